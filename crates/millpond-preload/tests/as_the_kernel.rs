//! Programs whose results must be the kernel's, whenever their files are served.

mod common;

use common::{ALL_MODES, Pond, ServedFiles, succeed};

/// The ponds of each mode with each choice of files.
fn ponds() -> impl Iterator<Item = (String, Pond)> {
    let choices = [ServedFiles::Default, ServedFiles::HandOver(1), ServedFiles::Eager];
    ALL_MODES.into_iter().flat_map(move |mode| {
        choices.map(|files| {
            let name = format!("{mode:?}, {files:?}");
            (name, Pond::new().in_mode(mode).serving(files))
        })
    })
}

/// The program's output must be the same on the kernel alone and in all modes.
fn compare(source: &str, arguments: &[&str]) {
    let alone = Pond::new();
    let program = alone.compile(source, &["-O1"]);
    let expected = succeed(alone.plain(&program).args(arguments));
    for (name, pond) in ponds() {
        let found = succeed(pond.served(&program).args(arguments));
        for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
            assert_eq!(expected, found, "line {line} of {source} in {name}");
        }
        assert_eq!(expected.lines().count(), found.lines().count(), "{source} in {name}");
    }
}

/// Incident: the library kept its duplicate of a closed file until it was next called, so that the file could not be
/// executed (ETXTBSY), and its file system could not be unmounted.
#[test]
fn nothing_is_open_after_the_last_close() {
    compare("last_close.c", &["12"]);
}

/// Incident: the library held the registry's lock during a `dup2` over a socket that lingers. Another process's open of
/// a served file waited for it, up to the 45 seconds of the kernel's lease break.
#[test]
fn a_close_that_waits_keeps_no_lease() {
    for way in ["dup2", "dup2_file", "close_range", "closefrom", "close"] {
        compare("slow_close.c", &[way]);
    }
}

/// Incident: in mode back a lock relative to the end was placed by the size in the kernel, and not by the size after
/// the deferred writes.
#[test]
fn locks_land_where_the_kernel_puts_them() {
    compare("lock_ranges.c", &[]);
}

/// Incident: `ioctl(FICLONERANGE)` and `sendmsg` with a bad address, and a message whose `cmsg_len` was zero, ended the
/// program by SIGSEGV.
#[test]
fn bad_memory_is_refused() {
    compare("bad_memory.c", &[]);
}

/// Incident: with `--eager` a stream that appends was at offset 0 before its first write, and `re+` was read-only.
#[test]
fn streams_begin_and_behave_as_their_modes_say() {
    compare("stdio_modes.c", &[]);
}
