//! The live view: a table of engines, the latencies of one engine, and the files with the most reads.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Row, Table};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::engines::{self, Watched};
use super::text::{duration, hit_rate, objects, server, size};
use crate::printable::printable;

/// The refresh interval. Engines publish four times a second.
const PERIOD: Duration = Duration::from_secs(1);

/// The sort order of files.
#[derive(Clone, Copy)]
enum Order {
    Reads,
    Misses,
    Path,
}

impl Order {
    fn next(self) -> Self {
        match self {
            Self::Reads => Self::Misses,
            Self::Misses => Self::Path,
            Self::Path => Self::Reads,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Reads => "reads",
            Self::Misses => "misses",
            Self::Path => "path",
        }
    }
}

/// The counters of an engine in the last scan: hits, misses, operations.
type Counts = [u64; 3];

struct View {
    pid: Option<u32>,
    order: Order,
    is_paused: bool,
    /// The index, among the engines that time operations, of the engine whose latencies are shown.
    chosen: usize,
    engines: Vec<Watched>,
    /// The increase of each counter per second since the previous scan.
    rates: HashMap<u64, [f64; 3]>,
    before: HashMap<u64, Counts>,
    /// The time of the last scan.
    counted: Instant,
    /// The time of the last scan, or of the last refresh while paused.
    looked: Instant,
}

impl View {
    fn refresh(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let passed_s = now.duration_since(self.counted).as_secs_f64().max(1e-3);
        (self.counted, self.looked) = (now, now);
        self.engines = engines::find(self.pid)?;
        let counts = |one: &Watched| [one.value("hits"), one.value("misses"), one.operations()];
        let counts: HashMap<_, _> = self.engines.iter().map(|one| (one.id, counts(one))).collect();
        let rate = |(id, now): (&u64, &Counts)| {
            let before = self.before.get(id).copied().unwrap_or(*now);
            let grown = |n: usize| now[n].saturating_sub(before[n]) as f64 / passed_s;
            (*id, [grown(0), grown(1), grown(2)])
        };
        self.rates = counts.iter().map(rate).collect();
        self.before = counts;
        Ok(())
    }

    fn draw(&self, frame: &mut Frame) {
        let engine_rows = self.engines.len() as u16 + 3;
        let areas = Layout::vertical([
            Constraint::Length(1),
            Constraint::Max(engine_rows),
            Constraint::Max(10),
            Constraint::Fill(1),
        ]);
        let [head, engines, latencies, files] = areas.areas(frame.area());
        let state = if self.is_paused { "paused" } else { "live" };
        let found = match (self.engines.is_empty(), self.pid) {
            (false, _) => format!("{} engines", self.engines.len()),
            (true, None) => "no engines".into(),
            (true, Some(pid)) => format!("process {pid} has no engine, or has ended"),
        };
        let keys = "q quit  s sort  p pause  ↑↓ latencies";
        frame.render_widget(Line::raw(format!("millpond top: {found}, {state}   {keys}")), head);
        frame.render_widget(self.engine_table(), engines);
        frame.render_widget(self.latency_table(), latencies);
        frame.render_widget(self.file_table(), files);
    }

    fn engine_table(&self) -> Table<'_> {
        let rows = self.engines.iter().map(|one| {
            let [hits, misses, operations] = self.rates.get(&one.id).copied().unwrap_or_default();
            Row::new([
                one.pid.to_string(),
                one.kind.into(),
                hit_rate(one.value("hits"), one.value("misses")),
                hit_rate(hits as u64, misses as u64),
                format!("{operations:.0}"),
                size(one.value("memory_bytes")),
                size(one.value("dirty_bytes")),
                size(one.value("writeback_bytes")),
                format!("{}/{}", one.value("served_files"), one.value("files")),
                printable(&one.program),
            ])
        });
        let widths = [8, 8, 7, 7, 10, 10, 10, 10, 9].map(Constraint::Length);
        let names = ["PID", "KIND", "HITS", "NOW", "OPS/S", "MEMORY", "DIRTY", "WRITING", "SERVED"];
        table(rows, names.into_iter().chain(["PROGRAM"]), widths, "engines")
    }

    /// Engines that time operations. A run does not: the engines of its processes do.
    fn timed(&self) -> impl Iterator<Item = &Watched> {
        self.engines.iter().filter(|one| !one.latencies.is_empty())
    }

    fn choose(&mut self, is_next: bool) {
        let last = self.timed().count().saturating_sub(1);
        let chosen = self.chosen.min(last);
        self.chosen = if is_next { (chosen + 1).min(last) } else { chosen.saturating_sub(1) };
    }

    /// The latencies of the chosen engine, or of the last one, if there are fewer now.
    fn latency_table(&self) -> Table<'_> {
        let timed = self.timed().take(self.chosen + 1).last();
        let rows = timed.into_iter().flat_map(|one| &one.latencies).map(|(kind, latency)| {
            let times = [latency.p50_ns, latency.p99_ns, latency.max_ns].map(duration);
            let [p50, p99, max] = times;
            Row::new([printable(kind), latency.count.to_string(), p50, p99, max])
        });
        let title = match timed {
            Some(one) => {
                let (reads, writers) = (one.value("waiting_reads"), one.value("waiting_writers"));
                let waiting = format!("waiting: {reads} reads, {writers} writers");
                let lines = [objects(one), server(one)].into_iter().flatten();
                let more: String = lines.map(|line| format!("; {line}")).collect();
                format!("latencies of {}; {waiting}{more}", one.pid)
            }
            None => "latencies".into(),
        };
        let widths = [14, 12, 10, 10].map(Constraint::Length);
        table(rows, ["OPERATION", "TIMED", "P50", "P99", "MAX"], widths, &title)
    }

    fn file_table(&self) -> Table<'_> {
        let mut files: Vec<_> = self.engines.iter().flat_map(|one| &one.files).collect();
        match self.order {
            // In the order of the scan; of several runs.
            Order::Reads => {
                files.sort_by_key(|f| std::cmp::Reverse(f.hits.saturating_add(f.misses)));
            }
            Order::Misses => files.sort_by_key(|file| std::cmp::Reverse(file.misses)),
            Order::Path => files.sort_by(|one, other| one.path.cmp(&other.path)),
        }
        let rows = files.into_iter().map(|file| {
            Row::new([
                file.pid.to_string(),
                file.hits.to_string(),
                file.misses.to_string(),
                if file.is_served { "served" } else { "kernel" }.into(),
                printable(&file.path),
            ])
        });
        let title = format!("files of runs, by {}", self.order.name());
        let widths = [8, 12, 12, 7].map(Constraint::Length);
        table(rows, ["PID", "HITS", "MISSES", "BY", "PATH"], widths, &title)
    }
}

/// The last column takes the remaining width.
fn table<'a, const N: usize>(
    rows: impl Iterator<Item = Row<'a>>,
    names: impl IntoIterator<Item = &'static str>,
    widths: [Constraint; N],
    title: &str,
) -> Table<'a> {
    let widths = widths.into_iter().chain([Constraint::Fill(1)]);
    let names = Row::new(names).style(Style::new().add_modifier(Modifier::BOLD));
    Table::new(rows, widths).header(names).block(Block::bordered().title(title.to_owned()))
}

/// Runs the view until the user or a signal ends it.
pub fn run(pid: Option<u32>) -> io::Result<()> {
    // The terminal is restored first, in every case.
    let is_ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_ended))?;
    }
    let mut terminal = ratatui::try_init()?;
    let outcome = show(&mut terminal, pid, &is_ended);
    ratatui::restore();
    outcome
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    pid: Option<u32>,
    is_ended: &AtomicBool,
) -> io::Result<()> {
    let mut view = View {
        pid,
        order: Order::Reads,
        is_paused: false,
        chosen: 0,
        engines: Vec::new(),
        rates: HashMap::new(),
        before: HashMap::new(),
        counted: Instant::now(),
        looked: Instant::now(),
    };
    view.refresh()?;
    while !is_ended.load(Relaxed) {
        terminal.draw(|frame| view.draw(frame))?;
        let left = PERIOD.saturating_sub(view.looked.elapsed());
        if event::poll(left)? {
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
            {
                match key.code {
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => break,
                    KeyCode::Char('q') | KeyCode::Esc => break,
                    KeyCode::Up => view.choose(false),
                    KeyCode::Down => view.choose(true),
                    KeyCode::Char('s') => view.order = view.order.next(),
                    KeyCode::Char('p') => view.is_paused = !view.is_paused,
                    _ => {}
                }
            }
        } else if view.is_paused {
            view.looked = Instant::now();
        } else {
            view.refresh()?;
        }
    }
    Ok(())
}
