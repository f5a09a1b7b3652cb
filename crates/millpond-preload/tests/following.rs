//! The functions that `runtime/following` finds without `dlsym`. This test compiles the module again, as the library
//! itself can't be linked with a test.

#![cfg(all(target_os = "linux", not(loom)))]
#![allow(dead_code, reason = "some of it is for the library alone")]

#[path = "../src/runtime"]
mod runtime {
    pub mod elf;
    pub mod following;
}

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use object::{Object, ObjectSymbol};
use runtime::elf::{home_of, next};
use runtime::following::{Following, Found};

fn libc_names() -> Vec<CString> {
    let home = home_of(libc::read as *mut _).expect("libc is loaded");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let name = String::from_utf8_lossy(home.file_name).into_owned();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let path: PathBuf = path.map(PathBuf::from).find(|path| path.ends_with(&name)).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let names = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    names.map(|symbol| CString::new(symbol.name().unwrap()).unwrap()).collect()
}

/// Goal: F1, F2: the module finds the definition that `dlsym` with RTLD_NEXT finds.
/// Method: all names that libc defines, of one version and of several, functions and variables; and some names that
/// no library defines.
#[test]
fn finds_what_dlsym_finds() {
    let following = Following::of(finds_what_dlsym_finds as *const () as usize);
    let [mut functions, mut unclear] = [0, 0];
    for name in libc_names() {
        match following.find(&name) {
            Found::Function(found) => {
                functions += 1;
                assert_eq!(found, next(&name), "{name:?}");
            }
            Found::Unclear => unclear += 1,
            Found::Nothing => assert!(next(&name).is_null(), "{name:?} is there"),
        }
    }
    assert!(functions > 1000 && unclear > 0, "{functions} functions, {unclear} unclear");
    for name in [c"io_uring_queue_init", c"no such function", c""] {
        assert_eq!(
            (following.find(name), next(name).is_null()),
            (Found::Nothing, true),
            "{name:?}"
        );
    }
}

/// Goal: the module finds the functions that a program's calls bind to, even if they have two versions.
#[test]
fn finds_what_calls_come_to() {
    let following = Following::of(finds_what_calls_come_to as *const () as usize);
    let names: [&CStr; 6] =
        [c"open64", c"read", c"pthread_cond_wait", c"fopen64", c"pthread_create", c"dlsym"];
    for name in names {
        let found = following.find(name);
        assert!(matches!(found, Found::Function(_)), "{name:?}: {found:?}");
    }
}
