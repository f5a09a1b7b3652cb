//! The data path of a file server: ranges of files over TCP, out of the cache.
//!
//! `cargo run --release --example file_server DIR [ADDRESS]`, then `curl -r 0-99 http://ADDRESS/FILE`
//!
//! A reply is sent from [`View`](millpond::View)s, which are the cache's own memory: nothing is copied but by the
//! socket. Files stay open, and so cached, from one request to the next. Without arguments it serves a file to itself.

use std::collections::HashMap;
use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};

use millpond::{Engine, File, OpenOptions};

/// A view lies within one page.
const PAGE_BYTES: u64 = 64 << 10;
const OPEN_MAX: usize = 1000;
const REQUEST_BYTES_MAX: u64 = 16 << 10;

struct Server {
    engine: Engine,
    root: PathBuf,
    open: Mutex<HashMap<PathBuf, Arc<File>>>,
}

impl Server {
    fn new(root: &Path) -> Result<Arc<Server>, Box<dyn Error + Send + Sync>> {
        let engine = Engine::builder().cache_bytes(64 << 20).build()?;
        Ok(Arc::new(Server { engine, root: root.canonicalize()?, open: Mutex::default() }))
    }

    fn file(&self, path: &str) -> io::Result<Arc<File>> {
        let path = Path::new(path.trim_start_matches('/'));
        if path.components().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if let Some(file) = self.open.lock().unwrap().get(path) {
            return Ok(Arc::clone(file));
        }
        // A link that leads out of the directory is no file of it.
        let real = self.root.join(path).canonicalize()?;
        if !real.starts_with(&self.root) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let options = OpenOptions::new().read(true).page_bytes(PAGE_BYTES as u32);
        let file = Arc::new(self.engine.open(real, &options)?);
        let mut open = self.open.lock().unwrap();
        if open.len() >= OPEN_MAX {
            open.clear();
        }
        Ok(Arc::clone(open.entry(path.to_path_buf()).or_insert(file)))
    }

    /// Requests of a connection, until it is closed.
    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?);
        let mut stream = &stream;
        while let Some((path, range)) = request(&mut lines)? {
            let opened = self.file(&path).and_then(|file| Ok((file.len()?, file)));
            let Ok((len, file)) = opened else {
                stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
                continue;
            };
            let Some(Range { start, end }) = range.map_or(Some(0..len), |range| within(range, len))
            else {
                let head = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n";
                write!(stream, "{head}Content-Range: bytes */{len}\r\n\r\n")?;
                continue;
            };
            let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
            write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n", end - start)?;
            if range.is_some() {
                write!(stream, "Content-Range: bytes {start}-{}/{len}\r\n", end - 1)?;
            }
            stream.write_all(b"\r\n")?;
            let mut at = start;
            while at < end {
                let page_end = (at / PAGE_BYTES + 1) * PAGE_BYTES;
                let view = file.view(at, (page_end.min(end) - at) as usize)?;
                if view.is_empty() {
                    // The file was cut since: the length that was promised can't be kept.
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                stream.write_all(&view)?;
                at += view.len() as u64;
            }
        }
        Ok(())
    }
}

/// The requested range: its first and last byte, `None` where the header leaves one out.
type Asked = (Option<u64>, Option<u64>);

/// Path and range of the next request; `None`: there are no more.
fn request(lines: &mut BufReader<TcpStream>) -> io::Result<Option<(String, Option<Asked>)>> {
    let mut lines = lines.take(REQUEST_BYTES_MAX);
    let mut line = String::new();
    if lines.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let (Some("GET"), Some(path)) = (words.next(), words.next()) else {
        return Err(io::Error::other("not a GET"));
    };
    let (path, mut range) = (path.to_owned(), None);
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some((name, value)) = line.trim_end().split_once(':') else {
            return Ok(Some((path, range)));
        };
        if name.eq_ignore_ascii_case("range")
            && let Some((first, last)) =
                value.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-'))
        {
            range = Some((first.parse().ok(), last.parse().ok()));
        }
    }
}

/// The bytes of a file of `len` that are asked for (RFC 9110, 14.1.2); `None`: it has none of them.
fn within(asked: Asked, len: u64) -> Option<Range<u64>> {
    let range = match asked {
        (Some(first), last) => first..last.map_or(len, |last| last.saturating_add(1).min(len)),
        (None, Some(suffix)) => len.saturating_sub(suffix)..len,
        (None, None) => return None,
    };
    (range.start < range.end).then_some(range)
}

fn listen(server: Arc<Server>, listener: TcpListener) -> io::Result<()> {
    for stream in listener.incoming() {
        let (server, stream) = (Arc::clone(&server), stream?);
        std::thread::spawn(move || {
            if let Err(error) = server.serve(stream) {
                eprintln!("a connection: {error}");
            }
        });
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let Some(root) = std::env::args_os().nth(1) else { return serve_itself(&std::env::temp_dir()) };
    let address = std::env::args().nth(2).unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(&address)?;
    println!("serving {} at http://{}", root.display(), listener.local_addr()?);
    Ok(listen(Server::new(Path::new(&root))?, listener)?)
}

pub fn serve_itself(dir: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let dir = dir.join(format!("millpond-example-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let bytes: Vec<u8> = (0..300_000u32).map(|number| (number / 7) as u8).collect();
    std::fs::write(dir.join("file"), &bytes)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = Server::new(&dir)?;
    std::thread::spawn(move || listen(server, listener));
    let get = |path: &str, range: &str| -> io::Result<(String, Vec<u8>)> {
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET {path} HTTP/1.1\r\nRange: {range}\r\n\r\n")?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply)?;
        let at = reply.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
        let body = reply.split_off(at);
        Ok((String::from_utf8_lossy(&reply).into_owned(), body))
    };
    for (range, expected) in [
        ("bytes=0-", &bytes[..]),
        ("bytes=65530-140000", &bytes[65_530..=140_000]),
        ("bytes=-5", &bytes[bytes.len() - 5..]),
    ] {
        let (head, body) = get("/file", range)?;
        assert!(head.starts_with("HTTP/1.1 206") && body == expected, "{range}: {head}");
    }
    assert!(get("/file", "bytes=300000-")?.0.starts_with("HTTP/1.1 416"));
    assert!(get("/../etc/passwd", "bytes=0-")?.0.starts_with("HTTP/1.1 404"));
    println!("served {} bytes and parts of them from {}", bytes.len(), dir.display());
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
