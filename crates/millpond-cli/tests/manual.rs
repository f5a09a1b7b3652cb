//! Tests of man pages, completions, and the script that installs them.

use std::path::Path;
use std::process::Command;

fn millpond(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_millpond")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
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
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let installed = Command::new(root.join("scripts/install"))
        .env("MILLPOND_PROGRAM", env!("CARGO_BIN_EXE_millpond"))
        .env("DESTDIR", prefix.path())
        .env("PREFIX", "/usr")
        .output()
        .unwrap();
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
