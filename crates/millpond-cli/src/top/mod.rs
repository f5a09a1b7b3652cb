//! `millpond top`: shows the statistics that running engines publish ([`engines`]), as a live view
//! ([`view`]), once as text or JSON, or over HTTP for Prometheus.

mod engines;
pub(crate) mod text;
mod view;

use std::io::{self, BufRead, BufReader, IsTerminal as _, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

use self::engines::Watched;
use crate::failure::{Context, FAILED, Failure, REFUSED, Result};

/// The time limit of a connection, from its first byte to the last one of the response: other connections
/// wait.
const PATIENCE: Duration = Duration::from_secs(2);
/// The maximum length of a request.
const REQUEST_BYTES_MAX: u64 = 8 << 10;

/// Shows what running engines of this user do
///
/// Shows engines built with `EngineBuilder::published`, caches of objects built with `published`, servers with
/// `millpond serve --stats`, and programs under `millpond run --stats` or `--explain`, with their files. Root sees
/// those of all users. Keys: q quits, s changes the order of files, p pauses, up and down
/// choose the engine whose latencies are shown.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Only this process, or the run it belongs to
    pid: Option<u32>,

    /// Print one snapshot as text
    #[arg(long)]
    once: bool,

    /// Print one snapshot as JSON
    #[arg(long, conflicts_with = "once")]
    json: bool,

    /// Serve the statistics over HTTP, at /metrics, in Prometheus' text format
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["once", "json"],
        num_args = 0..=1, default_missing_value = "127.0.0.1:9464")]
    prometheus: Option<SocketAddr>,
}

#[derive(Serialize)]
struct Snapshot {
    engines: Vec<Watched>,
}

pub fn run(args: &TopArgs) -> Result<()> {
    if let Some(address) = args.prometheus {
        return serve(address, args.pid);
    }
    if !args.once && !args.json {
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            return Err(Failure::new(
                REFUSED,
                "standard output is not a terminal: use --once or --json",
            ));
        }
        return view::run(args.pid).context("drawing on the terminal");
    }
    let engines = engines::find(args.pid).context("looking for engines")?;
    if let (Some(pid), true) = (args.pid, engines.is_empty()) {
        let why = "has no engine with published statistics, and belongs to no run with --stats";
        return Err(Failure::new(FAILED, format!("process {pid} {why}")));
    }
    let text = if args.json {
        serde_json::to_string_pretty(&Snapshot { engines }).context("writing JSON")? + "\n"
    } else if engines.is_empty() {
        "no engines\n".into()
    } else {
        text::plain(&engines)
    };
    io::stdout().write_all(text.as_bytes()).context("writing to standard output")
}

fn serve(address: SocketAddr, pid: Option<u32>) -> Result<()> {
    let listener = TcpListener::bind(address).context(format_args!("--prometheus {address}"))?;
    let bound = listener.local_addr().context("reading the bound address")?;
    writeln!(io::stdout(), "http://{bound}/metrics").context("writing to standard output")?;
    for connection in listener.incoming() {
        // An aborted connection affects no other one.
        let _ = connection.and_then(|connection| respond(connection, pid));
    }
    Ok(())
}

fn respond(connection: TcpStream, pid: Option<u32>) -> io::Result<()> {
    let mut connection = TimedConnection { connection, until: Instant::now() + PATIENCE };
    let mut request = BufReader::new(&mut connection).take(REQUEST_BYTES_MAX);
    let mut first = String::new();
    request.read_line(&mut first)?;
    // Read the whole request, or the close would reset the connection.
    let mut line = String::new();
    while request.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut words = first.split(' ');
    let (status, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => ("200 OK", text::prometheus(&engines::find(pid)?)),
        (Some("GET"), _) => ("404 Not Found", "see /metrics\n".into()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes())
}

/// A connection with a time limit for all its transfers together.
struct TimedConnection {
    connection: TcpStream,
    until: Instant,
}

impl TimedConnection {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl io::Read for TimedConnection {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.connection.set_read_timeout(self.left()?)?;
        self.connection.read(bytes)
    }
}

impl io::Write for TimedConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.connection.set_write_timeout(self.left()?)?;
        self.connection.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each metric that the dashboard queries is exported.
    #[test]
    fn the_dashboard_asks_for_metrics_that_there_are() {
        let dashboard = include_str!("../../../../docs/grafana-dashboard.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let mut asked = 0;
        for panel in json["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let query = target["expr"].as_str().unwrap();
                let names = query.split(|c: char| !c.is_ascii_lowercase() && c != '_');
                for name in names.filter(|name| name.starts_with("millpond_")) {
                    let counts = text::METRICS.iter().any(|(_, metric, ..)| *metric == name);
                    let times = name.strip_prefix(text::LATENCY_METRIC);
                    let is_served = counts || matches!(times, Some("_bucket" | "_sum" | "_count"));
                    assert!(is_served, "{name} in {query}");
                    asked += 1;
                }
            }
        }
        assert!(asked > 5, "{asked} queries");
    }
}
