//! Standard output, which may be a full disk or a pipe without a reader. `println!` panics there.

use std::fmt::Display;
use std::io::{self, Write};

use crate::failure::{Context, Result};

/// Prints the text and a newline.
pub fn print_line(text: impl Display) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    written.context("writing to standard output")
}
