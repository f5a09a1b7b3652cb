//! Link options of the preload library.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    // Never unmapped: hooks stay reachable from other libraries' destructors and from threads that
    // are still inside one when the process ends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
    link_unwinder();
}

/// Has the library carry its unwinder, where the compiler has it as an archive. Without, each process
/// loads libgcc_s.so.1 for it, whose start (it asks what the processor can do, which a virtual machine
/// answers slowly) takes 0.1 ms: a fifth of what the library costs `true`.
fn link_unwinder() {
    println!("cargo:rerun-if-env-changed=CC");
    if env::var_os("HOST") != env::var_os("TARGET") {
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
