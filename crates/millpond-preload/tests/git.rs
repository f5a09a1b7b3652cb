//! git: a repository made, packed, cloned and checked under the library; then checked without.

mod common;

use common::{MODES, Mode, Pond, lines, require, succeed};

#[test]
fn a_repository_from_init_to_fsck() {
    for mode in MODES {
        repository_in_mode(mode);
    }
}

fn repository_in_mode(mode: Mode) {
    require("git", "git");
    let pond = Pond::new().in_mode(mode);
    let config = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"];
    let git = |arguments: &[&str]| {
        let mut all = config.to_vec();
        all.extend(["-C", "repository"]);
        all.extend(arguments);
        let mut command = pond.served("git");
        command.args(&all).env("GIT_CONFIG_NOSYSTEM", "1").env("HOME", pond.aside("home"));
        succeed(&mut command)
    };
    std::fs::create_dir(pond.path("repository")).unwrap();
    git(&["init", "-q", "."]);
    for round in 0..4 {
        for file in 0..20 {
            let mut text = lines(2000 + 100 * file);
            text.extend(format!("round {round}\n").bytes());
            std::fs::write(pond.path(&format!("repository/file{file}")), text).unwrap();
        }
        git(&["add", "."]);
        git(&["commit", "-q", "-m", "round"]);
    }
    git(&["gc", "-q"]);
    git(&["fsck", "--full", "--strict"]);
    git(&["log", "-p", "--stat"]);
    git(&["clone", "-q", "--no-local", ".", "../clone"]);
    git(&["checkout", "-q", "HEAD~2"]);
    git(&["diff", "HEAD", "master@{0}"].map(|w| if w == "master@{0}" { "HEAD@{1}" } else { w }));
    git(&["checkout", "-q", "-"]);
    let report = pond.report();
    // The kernel alone runs these commands.
    for tree in ["repository", "clone"] {
        succeed(pond.plain("git").args(["-C", tree, "fsck", "--full", "--strict"]));
        assert_eq!(succeed(pond.plain("git").args(["-C", tree, "status", "--porcelain"])), "");
    }
    for file in 0..20 {
        let name = format!("file{file}");
        let of = |tree: &str| std::fs::read(pond.path(&format!("{tree}/{name}"))).unwrap();
        let expected = [lines(2000 + 100 * file), b"round 3\n".to_vec()].concat();
        assert!(of("repository") == expected && of("clone") == expected, "{name} differs");
    }
    // git reads a file again if it was changed in the same clock tick as its index: 5 to 5.8 million bytes were
    // counted, in each mode.
    report.assert_served(4 << 20);
}
