//! Paths that resolve to different files from one moment to the next.

mod common;

use common::{ALL_MODES, Pond, succeed};

/// Goal: a descriptor refers to the file that its open found, inside the directories of the run or outside, even
/// after the path resolves to another file. A write through it changes that file and no other, and a file outside the
/// directories is not served.
/// Method: one thread flips a link, others open it, read and write; once alone, and in each mode.
#[test]
fn links_that_are_flipped() {
    let alone = Pond::new();
    let program = alone.compile("flipped.c", &["-O1", "-pthread"]);
    let outside = alone.aside("outside");
    succeed(alone.plain(&program).arg(&outside).arg("300"));
    let eager = ALL_MODES.map(|mode| Pond::new().in_mode(mode));
    for pond in eager.into_iter().chain(Pond::unmeasured()) {
        let outside = pond.aside("outside");
        succeed(pond.served(&program).arg(&outside).arg("600"));
        let inside = std::fs::read(pond.path("sub/inside")).unwrap();
        let outside = std::fs::read(outside).unwrap();
        assert!(inside.len() == 30_000 && inside.iter().all(u8::is_ascii_lowercase));
        assert!(outside.len() == 30_000 && outside.iter().all(u8::is_ascii_uppercase));
    }
}

/// Goal: a file outside the directories of the run is not served, by any path that leads to it.
/// Method: a link to it, a path through a link to its directory, and one with `..`.
#[test]
fn ways_that_lead_outside() {
    for mode in ALL_MODES {
        let pond = Pond::new().in_mode(mode);
        let aside = pond.aside("data");
        std::fs::write(&aside, vec![b'A'; 300_000]).unwrap();
        std::os::unix::fs::symlink(&aside, pond.path("link")).unwrap();
        std::os::unix::fs::symlink(aside.parent().unwrap(), pond.path("directory")).unwrap();
        let above = format!("..{}", "/..".repeat(30));
        let around = format!("{above}{}", aside.display());
        for way in ["link", "directory/data", around.as_str()] {
            let read = pond.run("cat", &[way]);
            assert_eq!(read.len(), 300_000);
            let report = pond.report();
            assert_eq!(report.served_files, 0, "{way}: {}", report.lines);
        }
    }
}
