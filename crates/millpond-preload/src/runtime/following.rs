//! Finds definitions of replaced functions in the objects after this library, as of the program's start.
//!
//! The result equals that of `dlsym(RTLD_NEXT)`, which takes 900 instructions a name, more than a third of the time to
//! load the library. For each name without a definition `dlsym` also composes a message, in the user's language.
//!
//! - **FO1** `dl_iterate_phdr` lists the loaded objects in the order in which the loader searches them:
//!   the program, preloaded objects, then their dependencies, breadth first.
//! - **FO2** A name without a version is its default version: of an object's definitions the one that is not
//!   hidden. If that is ambiguous (several definitions, one that is found by a function, or an object with tables of
//!   another form), the search gives no result, and `dlsym` is called.

use std::ffi::{CStr, c_void};

use crate::runtime::elf::{Object, Tables, find_loaded};

/// Larger than the number of objects of most programs.
const OBJECTS_MAX: usize = 64;

/// The objects after this library, in order (FO1).
pub struct Following {
    tables: [Option<Tables>; OBJECTS_MAX],
    count: usize,
    /// Some objects are missing, so a name without a result may still be defined.
    is_cut: bool,
}

/// The result of a search for a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    Function(*mut c_void),
    Nothing,
    /// FO2.
    Unclear,
}

impl Following {
    /// The currently loaded objects, after the one that contains the address `own`.
    pub fn of(own: usize) -> Self {
        let mut following = Self { tables: [None; OBJECTS_MAX], count: 0, is_cut: false };
        let mut is_after = false;
        find_loaded(|info, headers| {
            if is_after {
                following.push(Object::of(info, headers));
            }
            is_after |=
                headers.iter().filter(|header| header.p_type == libc::PT_LOAD).any(|header| {
                    let start = (info.dlpi_addr + header.p_vaddr) as usize;
                    (start..start + header.p_memsz as usize).contains(&own)
                });
            None::<()>
        });
        following
    }

    fn push(&mut self, object: Option<Object>) {
        // Loaded by the kernel; the loader does not search there.
        if object.is_some_and(|object| object.file_name.starts_with(b"linux-vdso")) {
            return;
        }
        match (object.and_then(|object| object.tables()), self.tables.get_mut(self.count)) {
            (Some(tables), Some(place)) if !self.is_cut => {
                *place = Some(tables);
                self.count += 1;
            }
            // In order: no object after it is kept either.
            _ => self.is_cut = true,
        }
    }

    /// The first definition of `name`.
    pub fn find(&self, name: &CStr) -> Found {
        let hash = Tables::hash(name);
        for tables in self.tables[..self.count].iter().flatten() {
            let found = find_in(tables, name, hash);
            if found != Found::Nothing {
                return found;
            }
        }
        if self.is_cut { Found::Unclear } else { Found::Nothing }
    }
}

/// FO2.
fn find_in(tables: &Tables, name: &CStr, hash: u32) -> Found {
    const FUNCTION: u8 = 2;
    let mut is_hidden_there = false;
    let mut found = Found::Nothing;
    tables.each(name, hash, |symbol, is_hidden| {
        if is_hidden {
            is_hidden_there = true;
        } else if symbol.st_info & 0xf == FUNCTION && found == Found::Nothing {
            found = Found::Function(tables.address(symbol));
        } else {
            found = Found::Unclear;
        }
        false
    });
    if found == Found::Nothing && is_hidden_there { Found::Unclear } else { found }
}
