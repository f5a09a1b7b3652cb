//! Links the unwinder statically; part of two packages' build scripts.

use std::env;
use std::path::Path;
use std::process::Command;

/// Links the unwinder in, if the compiler has it as an archive. Otherwise each process loads libgcc_s.so.1
/// for it. That library's initialisation takes 0.1 ms, a fifth of the time that loading the preload library cost
/// `true`: it queries the processor's features, which is slow in a virtual machine.
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
