//! Builds the preload library, and embeds it in the CLI's binary.
//!
//! Cargo builds no `cdylib` for `cargo run` or `cargo install`, and installs none. Linking the library's
//! code into the CLI would hook the CLI's own reads and writes. So this script runs a second Cargo with a
//! separate target directory (in the same one it would wait forever for the lock of the outer Cargo), and
//! `src/run/preload.rs` includes the result.
//!
//! `MILLPOND_SKIP_PRELOAD=1` omits the library, for quick checks while working on the engine; such a
//! `millpond run` needs `MILLPOND_PRELOAD=FILE`.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

#[path = "../millpond-preload/build/unwinder.rs"]
mod unwinder;

const PACKAGE: &str = "millpond-preload";
const LIBRARY: &str = "libmillpond_preload.so";

/// Variables of the outer build that a nested Cargo must not inherit.
const NOT_INHERITED: [&str; 8] = [
    "CARGO_ENCODED_RUSTFLAGS",
    "RUSTFLAGS",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_BUILD_DIR",
    // Set by `cargo clippy`, which would check the library and not build it.
    "RUSTC_WORKSPACE_WRAPPER",
    "CLIPPY_ARGS",
];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../millpond-preload/build/unwinder.rs");
    unwinder::link();
    link_for_starts();
    println!("cargo::rerun-if-env-changed=MILLPOND_SKIP_PRELOAD");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    let embedded = variable("OUT_DIR").join(LIBRARY);
    let skipped = env::var_os("MILLPOND_SKIP_PRELOAD").is_some_and(|value| value != "0")
        || env::var_os("DOCS_RS").is_some();
    let outcome = if skipped {
        // An empty library: `run` reports the remedy.
        fs::write(&embedded, []).map_err(|error| format!("{}: {error}", embedded.display()))
    } else {
        build().and_then(|library| {
            fs::copy(&library, &embedded)
                .map(|_| ())
                .map_err(|error| format!("{}: {error}", library.display()))
        })
    };
    println!("cargo::rustc-env=MILLPOND_EMBEDDED_PRELOAD={}", embedded.display());
    let hash = hash(&fs::read(&embedded).unwrap_or_default());
    println!("cargo::rustc-env=MILLPOND_EMBEDDED_PRELOAD_HASH={hash:016x}");
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("building the preload library that `millpond run` needs: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the binary start fast, as each `millpond run` waits for it: at a fixed address no relocation is
/// needed. That saves the copies of 45 pages with pointers, which took 0.2 ms. The loss of address
/// randomisation is acceptable: this process runs a program that its user names, with the user's
/// privileges.
fn link_for_starts() {
    let is_gnu = env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|name| name == "gnu");
    if is_gnu && env::var_os("HOST") == env::var_os("TARGET") {
        println!("cargo::rustc-link-arg-bin=millpond=-no-pie");
    }
}

/// Builds the library; returns its path.
fn build() -> Result<PathBuf, String> {
    let root = variable("CARGO_MANIFEST_DIR").join("../..");
    let manifest = root.join("crates/millpond-preload/Cargo.toml");
    if !manifest.exists() {
        return Err(format!("{} is missing: build from a checkout", manifest.display()));
    }
    let target = env::var("TARGET").map_err(|error| error.to_string())?;
    let target_dir = variable("OUT_DIR").join("preload");

    // The CLI depends on all dependencies of the library, so the outer Cargo has fetched them. Trying
    // offline first keeps `--offline` and vendored builds working, and avoids network access otherwise.
    let mut output = cargo(&manifest, &target, &target_dir, true)?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() && stderr.contains("offline") {
        output = cargo(&manifest, &target, &target_dir, false)?;
    }
    if !output.status.success() {
        return Err(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    }

    let built = target_dir.join(&target).join("release").join(LIBRARY);
    if !built.exists() {
        return Err(format!("{} was not made: does {target} have cdylibs?", built.display()));
    }
    watch_sources(&root, &built.with_extension("d"));
    Ok(built)
}

fn cargo(
    manifest: &Path,
    target: &str,
    target_dir: &Path,
    offline: bool,
) -> Result<Output, String> {
    let mut command = Command::new(variable("CARGO"));
    for name in NOT_INHERITED {
        command.env_remove(name);
    }
    // Cancelled or exiting threads of the program unwind through the library's frames; with "abort" they
    // would end the process. The library itself ends the process at a panic.
    command.env("CARGO_PROFILE_RELEASE_PANIC", "unwind");
    // Function names stay, for backtraces; line tables would triple the size of the embedded library.
    command.env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    command.env("CARGO_ENCODED_RUSTFLAGS", rustflags());
    command.args(["build", "--quiet", "--release", "--package", PACKAGE, "--lib"]);
    // The target is named even for the host: so the flags apply to the library only, never to build
    // scripts.
    command.args(["--target", target]);
    command.arg("--target-dir").arg(target_dir);
    command.arg("--manifest-path").arg(manifest);
    if manifest.with_file_name("../../Cargo.lock").exists() {
        command.arg("--locked");
    }
    if offline {
        command.arg("--offline");
    }
    command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))
}

/// The outer build's compiler flags, without those for tests and instrumentation: `--cfg` (loom),
/// sanitizers and coverage.
fn rustflags() -> OsString {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let mut kept: Vec<&str> = Vec::new();
    let mut flags = flags.split('\u{1f}').filter(|flag| !flag.is_empty());
    while let Some(flag) = flags.next() {
        match flag {
            "--cfg" | "--check-cfg" => {
                flags.next();
            }
            "-C" | "-Z" | "--codegen" => {
                let Some(value) = flags.next() else { continue };
                if !is_instrument(value) {
                    kept.extend([flag, value]);
                }
            }
            _ if flag.starts_with("--cfg=") || is_instrument(&flag[flag.len().min(2)..]) => {}
            _ => kept.push(flag),
        }
    }
    kept.join("\u{1f}").into()
}

fn is_instrument(flag: &str) -> bool {
    ["sanitizer", "instrument-coverage"].iter().any(|name| flag.starts_with(name))
}

/// Makes Cargo rerun this script when a source of the library changes. Cargo's own dep-info lists them, so
/// this list can't become stale when the library gains a dependency.
fn watch_sources(root: &Path, dep_info: &Path) {
    let mut watched = BTreeSet::from([root.join("Cargo.toml"), root.join("Cargo.lock")]);
    let text = fs::read_to_string(dep_info).unwrap_or_default();
    let sources = text.split_once(": ").map_or("", |(_, sources)| sources);
    // Dep-info writes a space in a file name as "\ ".
    for source in sources.replace("\\ ", "\0").split_whitespace() {
        let source = PathBuf::from(source.replace('\0', " "));
        let manifest = source.ancestors().map(|parent| parent.join("Cargo.toml"));
        watched.extend(manifest.take(5).find(|manifest| manifest.exists()));
        watched.insert(source);
    }
    for file in watched.iter().filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn variable(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_else(|| panic!("Cargo did not set {name}")))
}
