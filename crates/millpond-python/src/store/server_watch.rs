//! Log lines about the caches of a store: whether its server is used, and why not.
//!
//! The caches work without a log of Python, on threads that may not enter it (runtime.R2). So each call that has waited
//! looks at its end whether the client has attached or lost its server, and whether there is a line to log.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwapOption;
use millpond_serve::SharedStore;
use pyo3::prelude::*;

use crate::process::{self, lock};

/// The state that the last log line was about.
#[derive(Default)]
struct Told {
    generation: u64,
    /// The client was attached at the end of the last call of this process.
    is_attached: bool,
    /// A log line says that the server is used. Children of fork do not repeat it.
    is_used: bool,
    failure: Option<String>,
}

/// The server of a store.
pub(crate) struct ServerWatch {
    pub(crate) client: SharedStore,
    url: String,
    socket: PathBuf,
    /// The program has named the socket, so it expects a server.
    is_expected: bool,
    told: Mutex<Told>,
}

/// The severity of a log line, by the names of `logging`.
#[derive(Clone, Copy)]
enum Level {
    Info,
    Warning,
}

fn log(py: Python<'_>, level: Level, text: String) {
    let number = match level {
        Level::Info => 20,
        Level::Warning => 30,
    };
    let logged = py
        .import("millpond._objects")
        .and_then(|module| module.call_method1("log", (number, text)));
    // At the end of the interpreter there is no log.
    drop(logged);
}

/// A line that a thread of the runtime has left for the log.
static NOTED: ArcSwapOption<String> = ArcSwapOption::const_empty();

/// Leaves a line for the log, at the end of a call.
pub(crate) fn note(text: String) {
    NOTED.store(Some(Arc::new(text)));
}

/// Logs the line that was left.
pub(crate) fn log_noted(py: Python<'_>) {
    if NOTED.load().is_some()
        && let Some(text) = NOTED.swap(None)
    {
        log(py, Level::Info, (*text).clone());
    }
}

impl ServerWatch {
    pub(crate) fn new(
        client: SharedStore,
        url: &str,
        socket: &Path,
        is_expected: bool,
    ) -> ServerWatch {
        let (url, socket, told) = (url.to_owned(), socket.to_owned(), Mutex::default());
        ServerWatch { client, url, socket, is_expected, told }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Why there is no server, after an attempt to attach: for the first time. The line that the server is used is for
    /// `millpond.store` to log, once in a process.
    pub(crate) fn tell_first(&self, py: Python<'_>) {
        let is_attached = self.client.is_attached();
        {
            let mut told = lock(&self.told);
            told.generation = process::generation();
            (told.is_attached, told.is_used) = (is_attached, is_attached);
        }
        if is_attached {
            return;
        }
        let failure = self.client.attach_failure();
        match failure {
            Some(error) if is_absence(error.kind()) && self.is_expected => {
                let (url, socket) = (&self.url, self.socket.display());
                let text = format!(
                    "{url}: no server at {socket}; cached in this process until one answers"
                );
                log(py, Level::Warning, text);
            }
            _ => self.tell(py),
        }
    }

    /// Logs a change since the last call.
    pub(crate) fn tell(&self, py: Python<'_>) {
        let is_attached = self.client.is_attached();
        let line = {
            let mut told = lock(&self.told);
            if told.generation != process::generation() {
                told.generation = process::generation();
                told.is_attached = false;
            }
            if told.is_attached && is_attached {
                return;
            }
            let was_attached = std::mem::replace(&mut told.is_attached, is_attached);
            self.line(&mut told, was_attached, is_attached)
        };
        if let Some((level, text)) = line {
            log(py, level, text);
        }
    }

    fn line(
        &self,
        told: &mut Told,
        was_attached: bool,
        is_attached: bool,
    ) -> Option<(Level, String)> {
        let (url, socket) = (&self.url, self.socket.display());
        if is_attached {
            told.failure = None;
            let is_new = !std::mem::replace(&mut told.is_used, true);
            return is_new
                .then(|| (Level::Info, format!("{url}: cached by the server at {socket}")));
        }
        let failure = self.client.attach_failure();
        let is_absent = failure.as_ref().is_none_or(|error| is_absence(error.kind()));
        if was_attached || (told.is_used && failure.is_some() && is_absent) {
            told.is_used = false;
            let text = format!(
                "{url}: the server at {socket} is gone; cached in this process until one answers"
            );
            return Some((Level::Warning, text));
        }
        let text = failure.filter(|_| !is_absent)?.to_string();
        if told.failure.as_ref() == Some(&text) {
            return None;
        }
        let level = if self.is_expected { Level::Warning } else { Level::Info };
        let line =
            format!("{url}: the server at {socket} is not used: {text}; cached in this process");
        told.failure = Some(text);
        Some((level, line))
    }
}

/// Whether an error says that no server runs.
fn is_absence(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}
