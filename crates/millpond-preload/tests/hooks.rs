//! Every function that the library replaces, under each of its names: its result and errno must be the kernel's.

mod common;

use common::{ALL_MODES, Mode, Pond, succeed};

fn same_with_and_without(options: &[&str]) {
    for mode in ALL_MODES {
        same_in_mode(options, mode);
    }
}

fn same_in_mode(options: &[&str], mode: Mode) {
    let (with, without) = (Pond::new().in_mode(mode), Pond::new());
    let program = with.compile("every_name.c", options);
    let expected = succeed(&mut without.plain(&program));
    let found = succeed(&mut with.served(&program));
    for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
        assert_eq!(found, expected, "line {line}, of {}", program.display());
    }
    assert_eq!(found.lines().count(), expected.lines().count());
    let files = |pond: &Pond| {
        ["a", "b", "c", "e", "s", "w", "left_open"]
            .map(|name| std::fs::read(pond.path(name)).unwrap())
    };
    assert!(files(&with) == files(&without), "the files differ");
    let report = with.report();
    assert!(report.served_bytes > 500_000, "{}", report.lines);
}

#[test]
fn plain_names() {
    same_with_and_without(&["-O0"]);
}

#[test]
fn fortified_names() {
    same_with_and_without(&["-O2", "-D_FORTIFY_SOURCE=2"]);
}

#[test]
fn large_file_names() {
    same_with_and_without(&["-O2", "-D_FILE_OFFSET_BITS=64"]);
}

/// Goal: functions that few programs call do not bypass the library, either.
#[test]
fn seldom_called_names() {
    for mode in ALL_MODES {
        let (with, without) = (Pond::new().in_mode(mode), Pond::new());
        let ring = with.compile("fake_uring.c", &["-shared", "-fPIC"]);
        let program =
            with.compile_with("seldom.c", &[], &[ring.to_str().unwrap(), "-laio", "-lutil"]);
        let expected = succeed(&mut without.plain(&program));
        let found = succeed(&mut with.served(&program));
        assert_eq!(found, expected, "in mode {mode:?}");
        let report = with.report();
        assert!(mode == Mode::Through || report.served_bytes > 5000, "{}", report.lines);
    }
}
