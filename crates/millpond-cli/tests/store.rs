//! Tests of `millpond store check`: its output and exit status.

use std::process::{Command, Output};

fn check(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command.args(["store", "check", "--rounds", "3"]).args(arguments).output().unwrap()
}

#[test]
fn a_good_store_is_told_in_words_and_json() {
    let output = check(&["memory:///"]);
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(words.contains("kept  racing_creates: of concurrent creates"), "{words}");
    let output = check(&["memory:///", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |name: &str| {
        let promises = report["promises"].as_array().unwrap();
        promises.iter().find(|promise| promise["name"] == name).unwrap()["verdict"].clone()
    };
    assert_eq!(of("racing_updates"), "kept");
    assert_eq!(of("lost_replies"), "not_tried");
}

#[test]
fn what_is_not_offered_and_what_is_refused_have_a_status() {
    let dir = tempfile::tempdir().unwrap();
    let output = check(&[&format!("file://{}", dir.path().display())]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    for bad in [&["nowhere"][..], &["memory:///", "--racers", "1"], &["s3:///prefix"]] {
        assert_eq!(check(bad).status.code(), Some(2), "{bad:?}");
    }
}
