//! The functions of libc that the library replaces: one file a family, and the table in `calls`
//! that says which they are.

pub mod aio;
pub mod by_number;
pub mod cancel;
pub mod clone;
pub mod descriptor;
pub mod exports;
pub mod io;
pub mod jump;
pub mod kernel;
pub mod lookup;
pub mod metadata;
pub mod open;
pub mod process;
pub mod signal;
pub mod stat;
pub mod stdio;
pub mod vfork;
