//! Link options of the preload library.

mod unwinder;

fn main() {
    // Never unmapped: hooks stay reachable from other libraries' destructors and from threads that
    // are still inside one when the process ends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build");
    unwinder::link();
}
