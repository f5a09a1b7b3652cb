//! Power cuts under the library. After the program's `fdatasync` has returned, the file's data survives, also data
//! that another process moved into the file, or that the program wrote before it closed and reopened the file.
//!
//! Incident: a program wrote data, closed the file, opened it again, wrote a header and called `fdatasync`. In mode
//! back only the header was durable. See `tests/power_cut` of the engine for the disk.
//! mode back the header alone was made durable. See `tests/power_cut` of the engine for the disk.

mod common;
#[path = "../../millpond/tests/power/mod.rs"]
mod power;

use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use common::{ALL_MODES, Pond, succeed};
use power::{Disk, Unflushed};

const A_BYTES: usize = 1 << 20;
const B_BYTES: usize = 4096;

/// The disk of the other tests, when they start this program again.
#[test]
#[ignore = "a role, in which others start this program"]
fn the_disk_of_the_others() {
    power::recorder::run();
}

/// Runs the program in all modes, with a served source and with one that is not served; cuts the power when its sync
/// has returned.
fn run(how: &str, sync: &str) {
    let Some(mut disk) = Disk::start("the_disk_of_the_others") else { return };
    for mode in ALL_MODES {
        for source_is_served in [true, false] {
            let pond = Pond::in_dir(&disk.path("")).in_mode(mode);
            run_in(&mut disk, &pond, &format!("{mode:?}"), [how, sync], source_is_served);
        }
    }
}

fn run_in(disk: &mut Disk, pond: &Pond, mode: &str, args: [&str; 2], source_is_served: bool) {
    let program = pond.compile("power_cut.c", &["-O1"]);
    let file = pond.path("file");
    let source = if source_is_served { pond.path("source") } else { disk.path("source") };
    // A child process makes the files. If this process did, a child that another test's thread forks at that time
    // would have the file open until it executes, and a file that is open in another process is not served.
    make(pond, &file, r"\001", A_BYTES + B_BYTES);
    make(pond, &source, r"\012", A_BYTES);

    let mut command = pond.served(program);
    command.args(args).arg(source).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = [0; 7];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut said).expect("the program said why it did not sync");
    let name = file.strip_prefix(disk.path("")).unwrap().to_str().unwrap();
    let found = [Unflushed::Lost, Unflushed::Some(7)]
        .map(|unflushed| disk.cut(unflushed).read(name).expect("the file is there"));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());

    let count = |range: &[u8], value| range.iter().filter(|byte| **byte == value).count();
    let right = found.map(|found| (count(&found[..A_BYTES], 0xA), count(&found[A_BYTES..], 0xB)));
    let what = format!("{args:?}, {mode}, {source_is_served}: bytes that are there");
    assert_eq!(right, [(A_BYTES, B_BYTES); 2], "{what}");
    let report = pond.report();
    assert!(report.served_files > 0, "the library served nothing: {}", report.lines);
}

/// Makes a durable file of `len` bytes, all of one value, given in octal.
fn make(pond: &Pond, path: &Path, byte: &str, len: usize) {
    let script = r#"head -c "$3" /dev/zero | tr '\000' "$2" >"$1" && sync "$1""#;
    let mut shell = pond.plain("sh");
    succeed(shell.args(["-c", script, "sh"]).arg(path).arg(byte).arg(len.to_string()));
}

/// Goal: `fdatasync` covers bytes that were written before the program closed the file and opened it again.
#[test]
fn written_before_it_was_opened_again() {
    run("reopen", "fdatasync");
}

/// Goal: `fdatasync` covers bytes that were copied before, by the library or in the kernel.
#[test]
fn copied() {
    run("copy_file_range", "fdatasync");
    run("copy_file_range", "fsync");
}

/// Goal: the same for `sendfile`.
#[test]
fn sent() {
    run("sendfile", "fdatasync");
}

/// Goal: the same for bytes that another process wrote.
#[test]
fn written_by_a_child() {
    run("process", "fdatasync");
}
