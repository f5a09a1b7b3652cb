//! One file that a program has open several times, to read and to write.

mod common;

use std::io::Read;
use std::process::Stdio;

use common::{Adoption, MODES, Mode, Pond, Report, succeed};

fn on_use() -> Pond {
    Pond::new().adopting(Adoption::OnUse)
}

/// On the kernel alone, and with files adopted on use and at random, in all modes. Returns what was
/// reported of those adopted on use.
fn run(plain: &[&str], scenario: &[&str]) -> Vec<Report> {
    let alone = Pond::new();
    let program = alone.compile("several.c", &["-O1"]);
    succeed(alone.plain(&program).args(plain));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).args(plain));
    }
    let run = |mode| {
        let pond = on_use().in_mode(mode);
        succeed(pond.served(&program).args(scenario));
        pond.report()
    };
    MODES.map(run).into()
}

/// Goal: what one thread has written every other one reads from then on, each with a descriptor of its own
/// that it opens and closes meanwhile; and other programs find it.
#[test]
fn threads_that_open_for_themselves() {
    run(&["stamps"], &["stamps"]);
}

/// Goal: the file is served to all of them, so what they read is whole.
#[test]
fn threads_with_descriptors_of_their_own_are_served() {
    for report in run(&["whole", "0"], &["whole", "1"]) {
        assert!(report.served_bytes > 150 << 20, "{}", report.lines);
        assert!(report.served_share() > 0.9, "{}", report.lines);
    }
}

/// Goal: each descriptor has its own rights, flags and offset, whatever is done to it or another one, and
/// whoever disturbs.
#[test]
fn anything_on_any_of_several() {
    let reports = run(&["model", "1"], &["model", "2"]);
    for report in reports {
        assert!(report.served_bytes > 2 << 20, "{}", report.lines);
        assert!(report.passed_for("open-twice") > 3, "{}", report.lines);
    }
}

/// Goal: the same where nothing can be opened anew when the file is given back.
#[test]
fn given_back_without_a_free_number() {
    run(&["limit"], &["limit"]);
}

/// Goal: a file that is served stays so when the program opens it once more; what it may not, it may not.
#[test]
fn opened_further_while_it_is_served() {
    for report in run(&["further"], &["further"]) {
        assert!(report.served_share() > 0.75, "{}", report.lines);
        assert!(report.served_files > 500, "{}", report.lines);
    }
}

/// Goal: what was opened stays open with its own offset when the process may not open it any more, also for
/// a child.
#[test]
fn rights_that_are_given_up() {
    run(&["rights"], &["rights"]);
}

/// Goal: the keeper has what was written by all of them.
#[test]
fn killed_with_several() {
    let page_bytes = 4096;
    for (kill, mode) in [Mode::Back, Mode::Back, Mode::BackDirect].into_iter().enumerate() {
        let pond = on_use().in_mode(mode);
        let program = pond.compile("several.c", &["-O1"]);
        let mut child = pond.served(&program).arg("killed").stdout(Stdio::piped()).spawn().unwrap();
        let mut told = child.stdout.take().unwrap();
        let mut stamp = [0; 8];
        for _ in 0..3000 + 700 * kill {
            told.read_exact(&mut stamp).unwrap();
        }
        child.kill().unwrap();
        let mut rest = Vec::new();
        told.read_to_end(&mut rest).unwrap();
        let last = u64::from_le_bytes(stamp) + rest.len() as u64 / 8;
        child.wait().unwrap();
        // Waits until the keeper has written.
        let found = std::fs::read(pond.path("f")).unwrap();
        let pages = (found.len() / page_bytes) as u64;
        assert_eq!(pages, 256);
        for page in 0..pages {
            let least = last - (last - page) % pages;
            let bytes = &found[page as usize * page_bytes..][..page_bytes];
            let stamps = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            let stamps: std::collections::BTreeSet<u64> = stamps.collect();
            // The one that was under way may have come.
            let is_whole = stamps.len() == 1 && stamps.first().is_some_and(|stamp| *stamp == least);
            let is_next = (last + 1) % pages == page && stamps.contains(&(last + 1));
            assert!(is_whole || is_next, "page {page}, last {last}, least {least}: {stamps:?}");
        }
    }
}
