//! Programs that start others, and read a little of many files: git, an interpreter, a compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use super::fixtures::{self, WorkDirectory, program};
use super::job::{JobRunner, JobTarget, ProgramJob, clear, target};
use crate::failure::{Context, Result};

const GIT: JobTarget = target("git", 0.95);
const PYTHON: JobTarget = target("python-start", 0.95);
const CC: JobTarget = target("cc", 0.95);

pub fn run(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    git(work_dir, runner)?;
    python(work_dir, runner);
    compiler(work_dir, runner)
}

/// Clones a repository, object by object, and checks the clone.
fn git(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    if !runner.wants(&[GIT]) {
        return Ok(());
    }
    if let Err(reason) = program("git", "git") {
        runner.skip(&[GIT], reason);
        return Ok(());
    }
    let files = runner.plan.count(2_000, 500);
    let repository = work_dir.at("repository");
    fixtures::tree(&repository, files).context(repository.display())?;
    let script = "git init -q && git add . && git commit -qm one && \
                  for file in */*1.txt; do echo more >>$file; done && git commit -qam two && \
                  git gc -q && echo last >last && git add . && git commit -qm three";
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(&repository);
    command.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")]);
    for who in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{who}_NAME"), "bench").env(format!("GIT_{who}_EMAIL"), "bench@");
        command.env(format!("GIT_{who}_DATE"), "1700000000 +0000");
    }
    fixtures::make(&mut command)?;
    fixtures::settle(&work_dir.path)?;
    let script = "git clone -q --no-hardlinks repository out && git -C out fsck --no-progress";
    let job = ProgramJob::new(GIT, files, ["sh", "-c", script]).makes(work_dir.at("out"));
    runner.measure(&work_dir.path, &job.reads(&[&repository]));
    clear(&work_dir.at("out")).context("out")
}

/// Starts an interpreter over and over.
fn python(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) {
    if !runner.wants(&[PYTHON]) {
        return;
    }
    let starts = runner.plan.count(20, 5);
    match interpreter() {
        Ok(python) => {
            let script = format!(
                "n=0; while [ $n -lt {starts} ]; do {} -c pass || exit 1; n=$((n + 1)); done",
                python.display()
            );
            runner.measure(&work_dir.path, &ProgramJob::new(PYTHON, starts, ["sh", "-c", &script]));
        }
        Err(reason) => runner.skip(&[PYTHON], reason),
    }
}

/// The command on the path may be a script that starts the interpreter.
fn interpreter() -> std::result::Result<PathBuf, String> {
    let found = program("python3", "python3")?;
    let mut command = Command::new(found);
    let told = fixtures::make(command.args(["-c", "import sys; print(sys.executable)"]));
    told.map(|path| path.trim().into()).map_err(|failure| failure.message)
}

/// Compiles some files, one at a time.
fn compiler(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    if !runner.wants(&[CC]) {
        return Ok(());
    }
    if let Err(reason) = program("cc", "gcc") {
        runner.skip(&[CC], reason);
        return Ok(());
    }
    let files = runner.plan.count(50, 10);
    let sources = work_dir.at("sources");
    write_sources(&sources, files).context(sources.display())?;
    fixtures::settle(&work_dir.path)?;
    let script = "mkdir out && cd sources && \
                  for file in *.c; do cc -O1 -c -o ../out/$file.o $file || exit 1; done";
    let job = ProgramJob::new(CC, files, ["sh", "-c", script]).makes(work_dir.at("out"));
    runner.measure(&work_dir.path, &job.reads(&[&sources]));
    clear(&work_dir.at("out")).context("out")
}

/// C files with a header of their own and some of the system's.
fn write_sources(dir: &Path, files: usize) -> io::Result<()> {
    const FUNCTIONS: usize = 40;
    fs::create_dir(dir)?;
    let declared = |name: &str| format!("int {name}(const char *text, int count)");
    let mut header = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    for file in 0..files {
        header += &format!("{};\n", declared(&format!("file{file}_0")));
    }
    fs::write(dir.join("all.h"), header)?;
    for file in 0..files {
        let mut text = String::from("#include \"all.h\"\n#include <sys/stat.h>\n");
        for function in 0..FUNCTIONS {
            text += &format!(
                "{} {{\n    int sum = {function};\n    for (int i = 0; i < count; i++)\n        \
                 sum += text[i % strlen(text)] * (i ^ {file});\n    return sum;\n}}\n",
                declared(&format!("file{file}_{function}"))
            );
        }
        fs::write(dir.join(format!("file{file:02}.c")), text)?;
    }
    Ok(())
}
