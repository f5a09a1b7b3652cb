//! The log of the server on standard error: one line for each event.

use std::fmt;
use std::os::fd::AsFd;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::failure::{Failure, REFUSED, Result};
use crate::printable::printable;

/// The variable of the environment that has the level, unless the option is given.
const VARIABLE: &str = "MILLPOND_LOG";

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

/// Logs to standard error from now on. `option`: that of the command line.
pub fn start(option: Option<&Targets>) -> Result<()> {
    let filter = match (option, std::env::var_os(VARIABLE)) {
        (Some(filter), _) => filter.clone(),
        (None, None) => Targets::new().with_default(LevelFilter::WARN),
        (None, Some(text)) => parse_filter(&text.to_string_lossy())
            .map_err(|error| Failure::new(REFUSED, format!("{VARIABLE}: {error}")))?,
    };
    let lines = tracing_subscriber::fmt::layer()
        .event_format(LogLines { is_for_journal: is_journal(std::io::stderr()) })
        .with_writer(std::io::stderr);
    let subscriber = tracing_subscriber::registry().with(lines).with(filter);
    subscriber.try_init().map_err(|error| Failure::new(crate::failure::FAILED, error.to_string()))
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
        writeln!(writer, "millpond: {level}: {}", printable(&fields))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(is_for_journal: bool, filter: &str) -> String {
        let output = LogBuffer::default();
        let writer = output.clone();
        let lines = tracing_subscriber::fmt::layer()
            .event_format(LogLines { is_for_journal })
            .with_writer(move || writer.clone());
        let subscriber =
            tracing_subscriber::registry().with(lines).with(parse_filter(filter).unwrap());
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(error = %"no\n<3>millpond: error: forged \x1b[31m", "a client was refused");
            tracing::info!("detail");
        });
        let bytes = output.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn an_event_is_a_line_with_its_priority() {
        let text = logged(true, "warn");
        assert!(text.starts_with("<4>millpond: warning: a client was refused error=no"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        let text = logged(false, "off,millpond=info");
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.starts_with("20") && text.contains("Z millpond: warning: "), "{text}");
        assert!(text.contains("millpond: info: detail\n"), "{text}");
        assert_eq!(logged(false, "off"), "");
    }

    #[test]
    fn unclear_filters_are_refused() {
        for text in ["", "wran", "warn,millpond_serve", "millpond_serve=loud"] {
            assert!(parse_filter(text).is_err(), "{text}");
        }
    }
}
