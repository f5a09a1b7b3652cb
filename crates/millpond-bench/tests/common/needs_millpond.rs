//! The `millpond` program, which `millpond-bench` starts.

use std::path::Path;

use crate::skip;

/// Whether `millpond` is beside `millpond-bench`. `cargo test --workspace` builds both.
pub fn has_millpond() -> bool {
    let has = Path::new(env!("CARGO_BIN_EXE_millpond-bench")).with_file_name("millpond").exists();
    if !has {
        skip::skip(
            "millpond is not built; run `cargo build -p millpond-cli` with the same profile",
        );
    }
    has
}
