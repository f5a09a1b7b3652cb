//! A running `millpond serve`.
#![allow(dead_code)] // Not every test uses all of it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

pub fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command.arg("serve").args(arguments).env_remove("XDG_RUNTIME_DIR");
    command
}

pub fn output(arguments: &[&str]) -> Output {
    serve(arguments).output().unwrap()
}

/// A running server, with its lines up to `serving`.
pub fn start(arguments: &[&str]) -> (Child, Vec<String>) {
    let mut child = serve(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let lines = lines.take_while(|line| line != "serving").collect();
    (child, lines)
}

pub fn stop(mut child: Child, with: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([with, &id]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
}
