//! Reads from the kernel's page cache: they return the kernel's bytes in each situation, and are not torn by the
//! program's own writes.

mod common;

use common::{Mode, Pond, Report, ServedFiles, succeed};

/// Runs a scenario on the kernel alone, mapped from the first read on, and mapped on use. Returns the output of the
/// kernel's run, and output and report of the mapped runs.
fn run(scenario: &str) -> (String, Vec<(String, Report)>) {
    let alone = Pond::new();
    let program = alone.compile("page_cache.c", &["-O1"]);
    let by_kernel = succeed(alone.plain(&program).arg(scenario));
    let mapped = [ServedFiles::Eager, ServedFiles::Default].map(|files| {
        let pond = Pond::new().in_mode(Mode::Through).serving(files);
        let printed = succeed(pond.served(&program).arg(scenario));
        (printed, pond.report())
    });
    (by_kernel, mapped.into())
}

#[track_caller]
fn is_as_by_the_kernel(scenario: &str) -> Vec<Report> {
    let (by_kernel, mapped) = run(scenario);
    let same = |(printed, report)| {
        assert_eq!(printed, by_kernel);
        report
    };
    mapped.into_iter().map(same).collect()
}

#[track_caller]
fn is_as_by_the_kernel_and_served(scenario: &str) {
    for report in is_as_by_the_kernel(scenario) {
        assert!(report.served_bytes > 0, "{}", report.lines);
    }
}

/// Goal: a read of 32 KiB is not torn by concurrent writes of the same process, by each call and by any descriptor.
#[test]
fn reads_beside_writes_are_whole() {
    let (_, mapped) = run("whole");
    for (printed, report) in mapped {
        assert_eq!(printed, "torn 0\n");
        assert!(report.served_bytes > 1 << 20, "{}", report.lines);
    }
}

/// Goal: lengths and bytes are right after another process has cut the file and made it longer, without a lease.
#[test]
fn a_file_that_others_cut() {
    is_as_by_the_kernel_and_served("cut");
}

/// Goal: bytes that another process stores past the end by a mapping are not part of the file.
#[test]
fn a_file_that_others_scribble_on() {
    is_as_by_the_kernel_and_served("scribbled");
}

/// Goal: a jump out of a handler that has interrupted a write leaves no page busy.
#[test]
fn a_jump_out_of_a_write() {
    is_as_by_the_kernel_and_served("jumped");
}

/// Goal: a handler that has interrupted a write may use the file.
#[test]
fn a_handler_inside_of_a_write() {
    is_as_by_the_kernel_and_served("handler");
}

/// Goal: a thread that blocks all signals survives when the file is cut during its read.
#[test]
fn a_thread_without_signals() {
    is_as_by_the_kernel("blocked");
}

/// Goal: the offset has the kernel's value, for each descriptor and each process that shares it.
#[test]
fn offsets() {
    is_as_by_the_kernel_and_served("offsets");
}

/// Goal: files beyond the limit of mappings and numbers beyond the library's table are the kernel's.
#[test]
fn more_files_than_mappings() {
    is_as_by_the_kernel_and_served("many");
}

/// Goal: `posix_fadvise(POSIX_FADV_DONTNEED)` drops pages that the library maps.
#[test]
fn pages_that_the_program_drops() {
    is_as_by_the_kernel_and_served("dropped");
}

/// Goal: the library has no thread in the process, and a close ends locks and mappings.
#[test]
fn nothing_is_left_of_a_closed_file() {
    is_as_by_the_kernel_and_served("alone");
}

/// Goal: a limit of the address space leaves the file to the kernel.
#[test]
fn a_limited_address_space() {
    is_as_by_the_kernel("address-space");
}

/// Goal: locked memory contains only the program's own pages.
#[test]
fn locked_memory() {
    is_as_by_the_kernel("locked");
}
