//! Command lines of `run` that are parsed without clap.
//!
//! clap first builds a description of all commands, which touches some 85 pages. That took half of the time from the
//! start of `millpond run` to the start of the program. So this module parses the options of runs in mode through
//! for which no parent process stays.
//!
//! - **P1** clap parses each line that this module accepts in the same way. All other lines are left to clap: other
//!   options, values that are wrong or begin with a dash, options that are given twice, mistakes.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;

use super::{Args, Backing, Mode, parse_cache_bytes};

impl Args {
    /// Parses the words after `run`, if this module accepts the line.
    pub fn of_plain(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut args = Self {
            cache: None,
            paths: Vec::new(),
            eager: false,
            quiet: false,
            backing: None,
            mode: Mode::Through,
            stats: false,
            explain: false,
            json: false,
            report: None,
            program: Vec::new(),
        };
        loop {
            let word = words.next()?;
            let is_new = match word.to_str()? {
                "--" => break,
                "--eager" => !std::mem::replace(&mut args.eager, true),
                "--quiet" => !std::mem::replace(&mut args.quiet, true),
                "--cache" => {
                    let bytes = parse_cache_bytes(value(&mut words)?.to_str()?).ok()?;
                    args.cache.replace(bytes).is_none()
                }
                "--backing" => {
                    let chosen = Backing::from_str(value(&mut words)?.to_str()?, false).ok()?;
                    args.backing.replace(chosen).is_none()
                }
                "--path" => {
                    args.paths.push(PathBuf::from(value(&mut words)?));
                    true
                }
                _ => false,
            };
            if !is_new {
                return None;
            }
        }
        args.program = words.collect();
        (!args.program.is_empty()).then_some(args)
    }
}

fn value(words: &mut impl Iterator<Item = OsString>) -> Option<OsString> {
    words.next().filter(|value| !value.is_empty() && !value.as_encoded_bytes().starts_with(b"-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Whole {
        #[command(flatten)]
        args: Args,
    }

    fn plainly(words: &[&str]) -> Option<Args> {
        Args::of_plain(words.iter().map(OsString::from))
    }

    /// Goal: P1. Method: all lines of up to four words before a program, from valid and invalid words.
    #[test]
    fn what_is_understood_is_what_clap_understands() {
        const WORDS: [&str; 13] = [
            "--cache",
            "64k",
            "4k",
            "--cache=64k",
            "--eager",
            "--quiet",
            "--path",
            "/tmp",
            "--backing",
            "direct",
            "--stats",
            "",
            "--",
        ];
        let mut understood = 0;
        for length in 0..=4 {
            for line in 0..WORDS.len().pow(length) {
                let chosen = (0..length).map(|at| WORDS[line / WORDS.len().pow(at) % WORDS.len()]);
                for program in [&["--", "true"][..], &["--", "cp", "--", "-x", ""], &["--"], &[]] {
                    let words: Vec<&str> = chosen.clone().chain(program.iter().copied()).collect();
                    let Some(args) = plainly(&words) else { continue };
                    understood += 1;
                    let whole = Whole::try_parse_from(["run"].iter().chain(&words));
                    let whole = whole.unwrap_or_else(|error| panic!("{words:?}: {error}"));
                    assert_eq!(args, whole.args, "{words:?}");
                }
            }
        }
        assert!(understood > 1000, "{understood}");
    }

    /// Goal: the lines of everyday use are accepted, and those that keep a parent process are not.
    #[test]
    fn plain_lines_are_understood() {
        let words =
            ["--cache", "1m", "--path", "/a", "--path", "b", "--quiet", "--", "a", "--", "-b"];
        let args = plainly(&words).unwrap();
        assert_eq!((args.cache, args.quiet, args.eager), (Some(1 << 20), true, false));
        assert_eq!(args.paths, ["/a", "b"].map(PathBuf::from));
        assert_eq!(args.program, ["a", "--", "-b"]);
        assert!(plainly(&["--", "true"]).is_some());
        for words in [
            &["--mode", "back", "--", "true"][..],
            &["--explain", "--", "true"],
            &["--help"],
            &["--", "--help"][..1],
            &["true"],
        ] {
            assert_eq!(plainly(words), None, "{words:?}");
        }
    }
}
