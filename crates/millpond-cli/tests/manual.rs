//! Tests of man pages, completions, and the script that installs them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn millpond(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_millpond")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The script, with the program of this test. `prefix` is absolute, and the files go below `destdir`.
fn install(destdir: &Path, prefix: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(root.join("scripts/install"));
    command.env("MILLPOND_PROGRAM", env!("CARGO_BIN_EXE_millpond"));
    command.env("DESTDIR", destdir).env("PREFIX", prefix);
    command
}

/// All files below `dir`.
fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.append(&mut files(&path));
        } else {
            found.insert(path);
        }
    }
    found
}

/// The long options that a command's help names, in order.
fn options(help: &str) -> Vec<&str> {
    let names = help.lines().filter_map(|line| {
        let line = line.trim_start();
        let at = line.starts_with('-').then(|| line.find("--"))??;
        line[at..].split([' ', ',', '=', '[']).next()
    });
    names.collect()
}

/// Goal: each command has a page and completions that know all of its options.
/// Method: searches both, as installed, for the options that `--help` shows.
#[test]
fn each_command_has_a_page_and_completions() {
    let prefix = tempfile::tempdir().unwrap();
    let installed = install(prefix.path(), "/usr").output().unwrap();
    assert!(installed.status.success(), "{installed:?}");
    let read = |path: &str| std::fs::read_to_string(prefix.path().join(path)).unwrap();
    let program = prefix.path().join("usr/bin/millpond");
    assert!(Command::new(program).arg("--version").status().unwrap().success());
    let commands = [
        vec!["run"],
        vec!["keeper"],
        vec!["serve"],
        vec!["rescue"],
        vec!["store", "check"],
        vec!["manual", "man"],
    ];
    let shells = [
        read("usr/share/bash-completion/completions/millpond"),
        read("usr/share/zsh/site-functions/_millpond"),
        read("usr/share/fish/vendor_completions.d/millpond.fish"),
    ];
    for words in commands {
        let mut arguments = words.clone();
        arguments.push("--help");
        let help = millpond(&arguments);
        let page = read(&format!("usr/share/man/man1/millpond-{}.1", words.join("-")));
        // A man page escapes hyphens.
        let page = page.replace("\\-", "-");
        let options = options(&help);
        assert!(options.contains(&"--help"), "{words:?}: {options:?}");
        for option in options {
            assert!(page.contains(option), "{words:?}: {option} is not in the page:\n{page}");
            for shell in &shells {
                let name = option.trim_start_matches('-');
                assert!(shell.contains(name), "{words:?}: no completion of {option}");
            }
        }
    }
    assert!(read("usr/share/man/man1/millpond.1").contains("millpond"));
    let page = read("usr/share/man/man1/millpond-serve.1").replace("\\-", "-");
    assert!(page.contains("SOCKET.endpoint.json") && page.contains("AWS_ENDPOINT"), "{page}");
    let unit = read("usr/lib/systemd/user/millpond-serve.service");
    assert!(unit.contains("ExecStart=/usr/bin/millpond serve"), "{unit}");
}

/// Goal: `--uninstall` removes each file that the installation made, and no other one.
/// Incident: the units of a prefix in a home directory were where no user manager looks for them.
#[test]
fn an_installation_is_removed() {
    for (prefix, units) in [
        ("/usr", "lib/systemd/user"),
        ("/usr/local", "lib/systemd/user"),
        ("/home/user/.local", "share/systemd/user"),
        ("/opt/millpond", "share/systemd/user"),
    ] {
        let destdir = tempfile::tempdir().unwrap();
        let place = destdir.path().join(&prefix[1..]);
        std::fs::create_dir_all(place.join("share/man/man1")).unwrap();
        std::fs::write(place.join("share/man/man1/millpond-other.1"), "another program's").unwrap();
        let others = files(destdir.path());
        let installed = install(destdir.path(), prefix).output().unwrap();
        assert!(installed.status.success(), "{installed:?}");
        let made = files(destdir.path());
        for kind in ["service", "socket"] {
            let unit = place.join(units).join(format!("millpond-serve.{kind}"));
            assert!(made.contains(&unit), "{made:?}");
        }
        let removed = install(destdir.path(), prefix).arg("--uninstall").output().unwrap();
        assert!(removed.status.success(), "{removed:?}");
        assert_eq!(files(destdir.path()), others);
        let again = install(destdir.path(), prefix).arg("--uninstall").output().unwrap();
        assert_eq!(again.status.code(), Some(1), "{again:?}");
    }
}

/// Goal: a setting that would have no effect, or a wrong one, is refused before any file is made.
#[test]
fn bad_installations_are_refused() {
    let destdir = tempfile::tempdir().unwrap();
    for (prefix, arguments) in [
        ("usr", &[][..]),
        ("/usr", &["--features", "s3"]),
        ("/usr", &["--uninstall", "--features"]),
    ] {
        let refused = install(destdir.path(), prefix).args(arguments).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    }
    assert_eq!(files(destdir.path()), BTreeSet::new());
}
