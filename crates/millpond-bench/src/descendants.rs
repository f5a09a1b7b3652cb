//! Ends the descendants of a process.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// Ends the processes below `parent`, from the leaves up: fio, programs, and `millpond run`.
pub fn end_children(parent: u32) {
    let tasks = fs::read_dir(format!("/proc/{parent}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()) {
            end_children(child);
            if let Some(pid) = Pid::from_raw(child as i32) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}
