//! `millpond manual`: man pages and shell completions, generated from the definition of the command line.

use std::path::{Path, PathBuf};

use clap_complete::Shell;

use crate::failure::{Context, Result};
use crate::standard_output::print_line;

/// Writes man pages or shell completions
#[derive(Debug, clap::Args)]
pub struct ManualArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Writes a man page for the program and one for each of its commands into DIR
    Man { dir: PathBuf },
    /// Prints the completions of SHELL
    Completions { shell: Shell },
}

/// Writes the manual of `program`, the whole command line.
pub fn run(args: &ManualArgs, mut program: clap::Command) -> Result<()> {
    match &args.what {
        What::Man { dir } => {
            program.build();
            page(&program, dir)
        }
        What::Completions { shell } => {
            // Not to standard output: it panics if a write fails.
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut program, "millpond", &mut text);
            print_line(String::from_utf8_lossy(&text).trim_end())
        }
    }
}

/// Writes the page of a command, and of its subcommands: `millpond-store-check.1`.
fn page(command: &clap::Command, dir: &Path) -> Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).replace(' ', "-");
    let path = dir.join(format!("{name}.1"));
    let write = || {
        let mut file = std::fs::File::create(&path)?;
        clap_mangen::Man::new(command.clone().display_name(&name)).render(&mut file)
    };
    write().context(format_args!("writing {}", path.display()))?;
    let shown = |below: &&clap::Command| !below.is_hide_set() && below.get_name() != "help";
    command.get_subcommands().filter(shown).try_for_each(|below| page(below, dir))
}
