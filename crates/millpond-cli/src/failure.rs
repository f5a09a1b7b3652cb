//! A failure of a program: a message for the user, and an exit status for the shell.

use std::fmt::Display;
use std::io::{self, Write as _};

use crate::printable::printable_lines;

pub type Result<T> = std::result::Result<T, Failure>;

/// A valid request failed.
pub const FAILED: u8 = 1;
/// The arguments, or the program to run, can't be accepted.
pub const REFUSED: u8 = 2;
/// The program to run was found and can't be executed; a shell's exit status.
pub const NOT_EXECUTABLE: u8 = 126;
/// The program to run was not found; a shell's exit status.
pub const NOT_FOUND: u8 = 127;

#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    pub message: String,
}

impl Failure {
    pub fn new(status: u8, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// Prints the message of `program`. A write error is ignored: the shell still gets the exit status.
    pub fn report(&self, program: &str) {
        let line = format!("{program}: {}\n", printable_lines(&self.message));
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Adds the failed activity to an error.
pub trait Context<T> {
    fn context(self, doing: impl Display) -> Result<T>;
}

impl<T, E: Display> Context<T> for std::result::Result<T, E> {
    fn context(self, doing: impl Display) -> Result<T> {
        self.map_err(|error| Failure::new(FAILED, format!("{doing}: {error}")))
    }
}
