//! Has what is built carry its unwinder, for two packages' build scripts.

use std::env;
use std::path::Path;
use std::process::Command;

/// Links the unwinder in, where the compiler has it as an archive. Without, each process loads libgcc_s.so.1
/// for it, whose start (it asks what the processor can do, which a virtual machine answers slowly) takes
/// 0.1 ms: a fifth of what loading the library cost `true`.
pub fn link() {
    println!("cargo:rerun-if-env-changed=CC");
    let is_gnu = env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|name| name == "gnu");
    if !is_gnu || env::var_os("HOST") != env::var_os("TARGET") {
        return;
    }
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let Ok(output) = Command::new(compiler).arg("-print-file-name=libgcc_eh.a").output() else {
        return;
    };
    let path = String::from_utf8_lossy(&output.stdout);
    // A name without a directory: there is none.
    if let Some(directory) = Path::new(path.trim()).parent().filter(|path| path.is_absolute()) {
        println!("cargo:rustc-link-search=native={}", directory.display());
        println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    }
}
