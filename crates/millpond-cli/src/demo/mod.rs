//! `millpond demo`: each mechanism of the engine beside the kernel's, in one table, within 15 seconds.
//!
//! A demonstration creates its files in one directory ([`scratch`]), measures the kernel and the engine in
//! alternating slices ([`slices`]), and returns rows ([`table`]). Each mechanism has a module:
//!
//! 1. [`cached_reads`]: random reads of cached blocks by one and two threads.
//! 2. [`shared_file`]: readers and writers of one file; torn reads are counted on both sides.
//! 3. [`cold_reads`]: many reads of a device in flight, and the threads that they need.
//! 4. [`wake_ups`]: a thread that waits for batches of completions.
//! 5. [`direct_reads`]: direct I/O with many requests in flight.
//! 6. [`kill`]: writes in mode back, SIGKILL, and a comparison of the file with the acknowledged writes.
//!
//! The files have no names, so no end of the process leaves any behind. A mechanism that the machine
//! refuses (no `O_DIRECT`, no Linux AIO) becomes a line below the table, and the others run.

mod cached_reads;
mod cold_reads;
mod direct_reads;
mod kill;
mod scratch;
mod shared_file;
mod slices;
mod table;
mod wake_ups;

use std::path::PathBuf;
use std::time::Instant;

pub use self::kill::WriterArgs;
pub use self::kill::write_until_killed;
use self::scratch::Scratch;
use self::table::Table;
use crate::failure::Result;
use crate::standard_output::print_line;

/// Shows each mechanism beside the kernel's, in 15 seconds.
///
/// Creates files without names in DIR, which needs 200 MiB of free space, and prints one table: cached
/// reads, readers and writers of one file, reads in flight, wake-ups, direct I/O, and a program that is
/// killed in mode back. Needs no root. `millpond-bench` measures the same with more care.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// The directory for the files
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

/// Measures one mechanism and adds its rows.
type Demonstration = fn(&Scratch, &mut Table) -> Result<()>;

/// Runs all demonstrations and prints their table.
///
/// # Errors
///
/// A directory that cannot hold the files; an I/O error of either side; a read that returned wrong bytes.
pub fn run(args: &DemoArgs) -> Result<()> {
    let started = Instant::now();
    let scratch = Scratch::new(&args.dir)?;
    let mut table = Table::new(&args.dir);
    print_line(table.heading())?;
    let demonstrations: [(&str, Demonstration); 6] = [
        ("cached reads", cached_reads::run),
        ("readers and writers of one file", shared_file::run),
        ("reads in flight", cold_reads::run),
        ("wake-ups", wake_ups::run),
        ("direct I/O", direct_reads::run),
        ("kill -9", kill::run),
    ];
    for (name, demonstration) in demonstrations {
        table.show_progress(name);
        demonstration(&scratch, &mut table)?;
    }
    table.print(started.elapsed())
}
