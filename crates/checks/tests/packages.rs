//! Goal: each published crate can be packaged with README and licenses, and the release script works.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PUBLISHED: [(&str, &str); 7] = [
    ("millpond-schedule", "schedule"),
    ("millpond-rangelock", "rangelock"),
    ("millpond", "millpond"),
    ("millpond-objects", "millpond-objects"),
    ("millpond-serve", "millpond-serve"),
    ("millpond-store-check", "millpond-store-check"),
    ("millpond-endpoint", "millpond-endpoint"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn run(command: &mut Command) -> (bool, String) {
    let done = command.output().unwrap();
    let text = [done.stdout, done.stderr].concat();
    (done.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn all_but_those_that_say_so_are_published() {
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().file_name().into_string().unwrap();
        let manifest = fs::read_to_string(root().join("crates").join(&folder).join("Cargo.toml"));
        let is_kept = manifest.unwrap().contains("publish = false");
        let is_published = PUBLISHED.iter().any(|(_, known)| *known == folder);
        assert_ne!(is_kept, is_published, "{folder}");
    }
}

#[test]
fn packages_have_readme_and_licenses_and_no_tests_of_megabytes() {
    for (name, _) in PUBLISHED {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["package", "--list", "--offline", "--allow-dirty", "-p", name]);
        let (ok, text) = run(cargo.current_dir(root()));
        assert!(ok, "{text}");
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "src/lib.rs", "Cargo.toml"] {
            assert!(text.lines().any(|line| line == file), "{name} lacks {file}:\n{text}");
        }
        assert!(!text.lines().any(|line| line.starts_with("fuzz/")), "{name}:\n{text}");
        // The symbolic links of the repository are files in the package.
        assert!(!text.contains("warning"), "{text}");
    }
}

#[test]
fn a_release_is_a_commit_and_a_tag() {
    let dir = tempfile::tempdir().unwrap();
    let clone = dir.path().join("clone");
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=test", "-c", "user.email=test@example.org"]).args(arguments);
        let (ok, text) = run(git.current_dir(&clone));
        assert!(ok, "{arguments:?}: {text}");
        text
    };
    // A copy and not a clone, as the sources may be outside of a repository.
    fs::create_dir(&clone).unwrap();
    let copy = "tar -C \"$0\" --exclude=./target --exclude=./.git -c . | tar -x";
    let (ok, text) = run(Command::new("sh").args(["-c", copy]).arg(root()).current_dir(&clone));
    assert!(ok, "{text}");
    // Between two releases the list of changes may be empty.
    let changelog = fs::read_to_string(clone.join("CHANGELOG.md")).unwrap();
    let with_an_entry = changelog.replacen("## Unreleased\n", "## Unreleased\n\n- An entry.\n", 1);
    fs::write(clone.join("CHANGELOG.md"), with_an_entry).unwrap();
    git(&["init", "-q"]);
    git(&["add", "-A"]);
    git(&["commit", "-qm", "before"]);
    let release = |arguments: &[&str]| {
        let mut script = Command::new("scripts/release");
        script.args(arguments).current_dir(&clone).env("CARGO_NET_OFFLINE", "true");
        let names = [("GIT_AUTHOR", "test"), ("GIT_COMMITTER", "test")];
        for (who, name) in names {
            script.env(format!("{who}_NAME"), name).env(format!("{who}_EMAIL"), "test@example.org");
        }
        run(&mut script)
    };
    for bad in [&["--no-verify", "1.x"][..], &[]] {
        assert!(!release(bad).0, "{bad:?}");
    }
    fs::write(clone.join("new"), "").unwrap();
    let (ok, text) = release(&["--no-verify", "9.9.9"]);
    assert!(!ok && text.contains("not committed"), "{text}");
    fs::remove_file(clone.join("new")).unwrap();

    let (ok, text) = release(&["--no-verify", "9.9.9"]);
    assert!(ok && text.contains("cargo publish -p millpond-objects"), "{text}");
    assert_eq!(git(&["status", "--porcelain"]), "");
    assert!(git(&["tag", "-n99"]).contains("v9.9.9"));
    let changelog = fs::read_to_string(clone.join("CHANGELOG.md")).unwrap();
    assert!(changelog.contains("## Unreleased\n\n## 9.9.9 - 20"), "{}", &changelog[..300]);
    let manifest = fs::read_to_string(clone.join("Cargo.toml")).unwrap();
    let before = concat!("\"", env!("CARGO_PKG_VERSION"), "\"");
    assert!(manifest.contains("version = \"9.9.9\"") && !manifest.contains(before));
    let (ok, text) = release(&["--no-verify", "9.9.9"]);
    assert!(!ok && text.contains("there is such a tag"), "{text}");
}
