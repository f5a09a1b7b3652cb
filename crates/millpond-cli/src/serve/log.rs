//! The log of the server on standard error: one line for each event.
//!
//! - **LG1** No thread that serves waits for the reader of the log: lines are queued for a thread of their own, and left out if the
//!   queue is full.
//! - **LG2** Clients can cause warnings as often as they want, so a place in the code has a limited number of them per minute.
//!
//! The next line of a place, in a later minute, has the number of those that were left out.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::failure::{Context, Failure, REFUSED, Result};
use crate::printable::printable;

/// The variable of the environment that has the level, unless the option is given.
const VARIABLE: &str = "MILLPOND_LOG";
/// Lines that wait for the reader of the log. Chosen.
const QUEUED_LINES_MAX: usize = 1024;
/// At the end of the server, the reader of the log has this time for the queued lines. Chosen.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Warnings and errors of one place in the code within a minute (LG2). Chosen.
const LINES_PER_MINUTE_MAX: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);

/// The filter of events, from the text of the option.
pub fn parse_filter(text: &str) -> std::result::Result<Targets, String> {
    // An empty text is a level for the parser.
    let is_level = |part: &str| !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    let is_clear = |part: &str| part.contains('=') || is_level(part);
    let parsed = text.split(',').map(str::trim).all(is_clear).then(|| text.parse().ok());
    parsed.flatten().ok_or_else(|| {
        format!(
            "{text:?} is neither off, error, warn, info, debug nor trace, nor a list with levels of modules, such as \
             warn,millpond_serve=debug"
        )
    })
}

/// A line, or the end of the log.
type QueuedLine = Option<Vec<u8>>;

/// Queues lines for the log's thread (LG1).
#[derive(Clone)]
struct LineQueue(SyncSender<QueuedLine>);

impl Write for LineQueue {
    /// Takes a line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Left out if the queue is full.
        _ = self.0.try_send(Some(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The running log. Its drop writes the queued lines.
pub struct Log {
    queue: LineQueue,
    ended: Receiver<()>,
}

impl Log {
    /// Starts the log's thread.
    fn to(mut output: impl Write + Send + 'static) -> io::Result<Log> {
        let (queue, lines) = sync_channel::<QueuedLine>(QUEUED_LINES_MAX);
        let (ends, ended) = channel::<()>();
        let write = move || {
            while let Ok(Some(line)) = lines.recv() {
                // An output that is gone has no other place for the error.
                _ = output.write_all(&line);
            }
            drop(ends);
        };
        std::thread::Builder::new().name("millpond-log".into()).spawn(write)?;
        Ok(Log { queue: LineQueue(queue), ended })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // A full queue means that the log is not read.
        if self.queue.0.try_send(None).is_ok() {
            // Nothing is sent: the sender is dropped at the end.
            _ = self.ended.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Logs to standard error from now on. `option`: that of the command line.
pub fn start(option: Option<&Targets>) -> Result<Log> {
    let filter = match (option, std::env::var_os(VARIABLE)) {
        (Some(filter), _) => filter.clone(),
        (None, None) => Targets::new().with_default(LevelFilter::WARN),
        (None, Some(text)) => parse_filter(&text.to_string_lossy())
            .map_err(|error| Failure::new(REFUSED, format!("{VARIABLE}: {error}")))?,
    };
    let log = Log::to(io::stderr()).context("the thread of the log")?;
    let queue = log.queue.clone();
    let lines = tracing_subscriber::fmt::layer()
        .event_format(LogLines::new(is_journal(io::stderr())))
        .with_writer(move || queue.clone());
    let subscriber = tracing_subscriber::registry().with(lines).with(filter);
    let started = subscriber.try_init();
    started.map_err(|error| Failure::new(crate::failure::FAILED, error.to_string()))?;
    Ok(log)
}

/// Whether the output is connected to systemd's journal (systemd.exec(5)).
fn is_journal(output: impl AsFd) -> bool {
    let Some(text) = std::env::var_os("JOURNAL_STREAM") else { return false };
    let found = rustix::fs::fstat(output);
    found.is_ok_and(|found| *text == *format!("{}:{}", found.st_dev, found.st_ino))
}

/// A line for an event: the time, or for the journal its priority, then the level, the message and the fields.
struct LogLines {
    is_for_journal: bool,
    /// Of each place in the code.
    recent: Mutex<HashMap<Identifier, RecentLines>>,
}

/// The lines of a place since the start of a minute.
struct RecentLines {
    start: Instant,
    written: u32,
    left_out: u64,
}

impl LogLines {
    fn new(is_for_journal: bool) -> LogLines {
        LogLines { is_for_journal, recent: Mutex::default() }
    }

    /// LG2. Whether the place may write a line, and the number of its lines that were left out in its last minute.
    fn admit(&self, place: Identifier, now: Instant) -> Option<u64> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || RecentLines { start: now, written: 0, left_out: 0 };
        let lines = recent.entry(place).or_insert_with(new);
        let mut left_out = 0;
        if now.duration_since(lines.start) >= MINUTE {
            left_out = std::mem::replace(lines, new()).left_out;
        }
        if lines.written == LINES_PER_MINUTE_MAX {
            lines.left_out += 1;
            return None;
        }
        lines.written += 1;
        Some(left_out)
    }
}

impl<S, N> FormatEvent<S, N> for LogLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut left_out = 0;
        // Other levels are there because they were asked for.
        if *event.metadata().level() <= Level::WARN {
            match self.admit(event.metadata().callsite(), Instant::now()) {
                Some(of_minute) => left_out = of_minute,
                None => return Ok(()),
            }
        }
        // Those of syslog(3).
        let (level, priority) = match *event.metadata().level() {
            Level::ERROR => ("error", 3),
            Level::WARN => ("warning", 4),
            Level::INFO => ("info", 6),
            Level::DEBUG => ("debug", 7),
            Level::TRACE => ("trace", 7),
        };
        if self.is_for_journal {
            write!(writer, "<{priority}>")?;
        } else {
            SystemTime.format_time(&mut writer)?;
            writer.write_char(' ')?;
        }
        let mut fields = String::new();
        context.field_format().format_fields(Writer::new(&mut fields), event)?;
        // Clients choose parts of the text.
        write!(writer, "millpond: {level}: {}", printable(&fields))?;
        if left_out > 0 {
            write!(writer, " ({left_out} more of them were left out)")?;
        }
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl LogBuffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Place;

    impl tracing::callsite::Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &tracing::Metadata<'_> {
            unreachable!("no event has this place")
        }
    }

    fn logged(is_for_journal: bool, filter: &str, log: impl FnOnce()) -> String {
        let output = LogBuffer::default();
        let writer = output.clone();
        let lines = tracing_subscriber::fmt::layer()
            .event_format(LogLines::new(is_for_journal))
            .with_writer(move || writer.clone());
        let subscriber =
            tracing_subscriber::registry().with(lines).with(parse_filter(filter).unwrap());
        tracing::subscriber::with_default(subscriber, log);
        output.text()
    }

    #[test]
    fn an_event_is_a_line_with_its_priority() {
        let log = || {
            tracing::warn!(error = %"no\n<3>millpond: error: forged \x1b[31m", "a client was refused");
            tracing::info!("detail");
        };
        let text = logged(true, "warn", log);
        assert!(text.starts_with("<4>millpond: warning: a client was refused error=no"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        let text = logged(false, "off,millpond=info", log);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.starts_with("20") && text.contains("Z millpond: warning: "), "{text}");
        assert!(text.contains("millpond: info: detail\n"), "{text}");
        assert_eq!(logged(false, "off", log), "");
    }

    /// Goal: a client that is refused again and again does not fill the disk of the log.
    #[test]
    fn warnings_of_a_place_are_few_in_a_minute() {
        let log = || {
            for number in 0..100 {
                tracing::warn!(number, "often");
                tracing::info!(number, "detail");
            }
            tracing::warn!("once");
        };
        let text = logged(true, "info", log);
        let count = |part: &str| text.matches(part).count();
        assert_eq!((count("often"), count("detail"), count("once")), (10, 100, 1), "{text}");
        let lines = LogLines::new(true);
        let place = Identifier(&Place);
        let now = Instant::now();
        let admitted = (0..30).filter_map(|_| lines.admit(place.clone(), now)).count();
        assert_eq!(admitted, 10);
        assert_eq!(lines.admit(place.clone(), now + MINUTE), Some(20));
        assert_eq!(lines.admit(place, now + MINUTE), Some(0));
    }

    /// Goal: a log that is not read delays no thread, and the end of the server by a second at most.
    #[test]
    fn a_log_that_is_not_read_is_not_waited_for() {
        let (_reader, output) = io::pipe().unwrap();
        let log = Log::to(output).unwrap();
        let mut queue = log.queue.clone();
        for _ in 0..10 * QUEUED_LINES_MAX {
            assert_eq!(queue.write(&[b'a'; 1000]).unwrap(), 1000);
        }
        drop(log);
    }

    #[test]
    fn the_end_of_the_log_writes_what_is_queued() {
        let output = LogBuffer::default();
        let log = Log::to(output.clone()).unwrap();
        let mut queue = log.queue.clone();
        for number in 0..100 {
            writeln!(queue, "{number}").unwrap();
        }
        drop(log);
        assert!(output.text().ends_with("\n99\n"), "{}", output.text());
    }

    #[test]
    fn unclear_filters_are_refused() {
        for text in ["", "wran", "warn,millpond_serve", "millpond_serve=loud"] {
            assert!(parse_filter(text).is_err(), "{text}");
        }
    }
}
