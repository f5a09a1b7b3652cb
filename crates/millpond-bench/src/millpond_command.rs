//! The `millpond` program that the benchmarks and tests start, and other programs on the search path.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::Access;

use crate::failure::{Context, Failure, REFUSED, Result};

/// The path of `millpond`: the variable `MILLPOND`, or the file beside this program. A `millpond` on the search path may be
/// another version, so it is not used.
pub fn millpond() -> Result<PathBuf> {
    if let Some(named) = env::var_os("MILLPOND").filter(|name| !name.is_empty()) {
        // Callers start it in other directories.
        return fs::canonicalize(&named).context(format!("MILLPOND={}", named.display()));
    }
    let own = env::current_exe().context("finding this program")?;
    let beside = own.with_file_name("millpond");
    if !beside.exists() {
        let message = format!(
            "{} is missing; build it with `cargo build --release -p millpond-cli`, or name it with MILLPOND=FILE",
            beside.display()
        );
        return Err(Failure::new(REFUSED, message));
    }
    Ok(beside)
}

/// The words that, put before a command, run it under `millpond` with `options`, and with the files in `served` served
/// from their first read.
///
/// # Errors
///
/// The message of `millpond`, if it cannot run a program.
pub fn launcher(options: &[&str], served: &Path) -> Result<Vec<OsString>> {
    let millpond = millpond()?;
    let tried = Command::new(&millpond).args(["run", "--quiet", "--", "true"]).output();
    let tried = tried.context(millpond.display())?;
    if !tried.status.success() {
        let message = String::from_utf8_lossy(&tried.stderr);
        let message = message.trim();
        let message = message.strip_prefix("millpond: ").unwrap_or(message);
        return Err(Failure::new(REFUSED, message));
    }
    let mut words: Vec<OsString> = vec![millpond.into()];
    words.extend(["run", "--eager", "--quiet"].iter().chain(options).map(OsString::from));
    words.extend(["--path".into(), served.as_os_str().to_owned(), "--".into()]);
    Ok(words)
}

/// The executable file `name` on the search path.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let search = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    find_in(&search, name)
}

fn find_in(search: &OsStr, name: &str) -> Option<PathBuf> {
    let is_executable =
        |path: &PathBuf| path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok();
    // An empty entry is the current directory.
    let places = env::split_paths(search).map(|dir| Path::new(".").join(dir).join(name));
    places.into_iter().find(is_executable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_on_the_search_path() {
        assert!(find_program("sh").unwrap().ends_with("sh"));
        assert_eq!(find_program("no-such-program"), None);
        assert_eq!(find_in("/etc".as_ref(), "passwd"), None, "not executable");
        assert_eq!(find_in("/".as_ref(), "etc"), None, "a directory");
    }
}
