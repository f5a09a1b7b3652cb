//! The table of a demonstration, the machine above it, and the next commands below it.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement};

use millpond_bench_peers::{file_system_name, processor_name};

use crate::failure::Result;
use crate::standard_output::print_line;

/// Ratios from here to 1 count as equal: a short run shows no smaller difference.
const EQUAL_FROM: f64 = 0.95;

pub struct Table {
    /// The directory, whose file system the heading names.
    dir: PathBuf,
    rows: Vec<[String; 4]>,
    notes: Vec<String>,
    /// Rows in which Millpond is behind the kernel.
    misses: usize,
}

impl Table {
    pub fn new(dir: &Path) -> Self {
        Table { dir: dir.to_owned(), rows: Vec::new(), notes: Vec::new(), misses: 0 }
    }

    pub fn heading(&self) -> String {
        let millpond = env!("CARGO_PKG_VERSION");
        let (cpu, file_system) = (processor_name(), file_system_name(&self.dir));
        let cores = thread::available_parallelism().map_or(0, usize::from);
        let uname = rustix::system::uname();
        let kernel = uname.release().to_string_lossy();
        let build = match cfg!(debug_assertions) {
            false => "",
            true => {
                "\nThis build is not optimized: its figures mean nothing. Use `cargo run --release -- demo`."
            }
        };
        format!(
            "Millpond {millpond} beside Linux {kernel} on {file_system}; {cpu}, {cores} cores{build}"
        )
    }

    /// One line on a terminal, which the next one replaces.
    pub fn show_progress(&self, what: &str) {
        if std::io::stderr().is_terminal() {
            let _ = write!(std::io::stderr(), "\r\x1b[2Kmeasuring {what} ...");
        }
    }

    /// A row in which more is better.
    pub fn add_ratio(&mut self, what: &str, kernel: String, millpond: String, ratio: f64) {
        let judged = match ratio {
            ratio if ratio >= EQUAL_FROM => format!("{ratio:.2} x"),
            ratio => {
                self.misses += 1;
                format!("{ratio:.2} x  behind")
            }
        };
        self.rows.push([what.into(), kernel, millpond, judged]);
    }

    /// A row in which less is better; `times` is how much less.
    pub fn add_less(&mut self, what: &str, kernel: String, millpond: String, times: f64) {
        self.misses += usize::from(times < EQUAL_FROM);
        let word = if times < EQUAL_FROM { "behind" } else { "" };
        self.rows.push([what.into(), kernel, millpond, format!("{times:.1} x  {word}")]);
    }

    /// A row of two counts without a ratio.
    pub fn add_counts(&mut self, what: &str, kernel: String, millpond: String, is_met: bool) {
        self.misses += usize::from(!is_met);
        let judged = if is_met { "" } else { "behind" };
        self.rows.push([what.into(), kernel, millpond, judged.into()]);
    }

    /// A line below the table.
    pub fn add_note(&mut self, note: String) {
        self.notes.push(note);
    }

    pub fn print(&self, took: Duration) -> Result<()> {
        if std::io::stderr().is_terminal() {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
        let mut table = comfy_table::Table::new();
        table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(["", "kernel", "Millpond", ""]).add_rows(&self.rows);
        for column in [1, 2] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let (rows, misses, seconds) = (self.rows.len(), self.misses, took.as_secs_f64());
        let mut text = format!("{table}\n");
        self.notes.iter().for_each(|note| text += &format!("{note}\n"));
        text += &format!(
            "{misses} of {rows} rows behind the kernel; {seconds:.1} s; short slices, so trust ratios to a tenth\n\n\
             millpond run --stats -- PROGRAM ARGS    runs a program on the engine, and says which reads it served\n\
             cargo doc --open -p millpond            documents the engine for Rust programs; docs/guide/c.md does for C\n\
             millpond-bench all --dir DIR --quick    measures all of it against its peers, in 4 minutes"
        );
        print_line(text)
    }
}

/// A rate in three digits.
pub fn per_second(rate: f64) -> String {
    match rate {
        rate if rate >= 1e6 => format!("{:.2} M/s", rate / 1e6),
        rate if rate >= 1e3 => format!("{:.0} k/s", rate / 1e3),
        rate => format!("{rate:.0} /s"),
    }
}

/// A number with separators between thousands.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([512.0, 4_321.0, 1.5e6].map(per_second), ["512 /s", "4 k/s", "1.50 M/s"]);
    }
}
