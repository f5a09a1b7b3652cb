//! LMDB: another process has written the environment. Each read is a transaction, and copies the value.

use std::path::Path;

use heed::types::{Bytes, U64};
use heed::{Database, Env, EnvOpenOptions};

use super::{LENGTHS, OBJECT, Peer, first_word, timed};
use crate::process::Done;
use crate::synthetic_store::content;

type Places = Database<U64<heed::byteorder::BE>, Bytes>;

fn open(dir: &Path) -> Done<Env> {
    let mut options = EnvOpenOptions::new();
    options.map_size(1 << 30).max_dbs(LENGTHS.len() as u32);
    // SAFETY: only this program's processes open the files, by LMDB, and none truncates them.
    Ok(unsafe { options.open(dir) }?)
}

/// Writes the environment, in a process of its own.
pub fn write(dir: &Path, object_bytes: u64) -> Done<()> {
    let env = open(dir)?;
    for len in LENGTHS {
        let mut transaction = env.write_txn()?;
        let places: Places = env.create_database(&mut transaction, Some(&len.to_string()))?;
        for place in (0..object_bytes).step_by(len) {
            places.put(&mut transaction, &place, &content(OBJECT, place..place + len as u64))?;
        }
        transaction.commit()?;
    }
    Ok(())
}

pub struct Lmdb {
    env: Env,
    databases: Vec<Places>,
    buffer: Vec<u8>,
}

impl Lmdb {
    pub fn attach(dir: &Path) -> Done<Lmdb> {
        let env = open(dir)?;
        let transaction = env.read_txn()?;
        let mut databases = Vec::new();
        for len in LENGTHS {
            let found = env.open_database(&transaction, Some(&len.to_string()))?;
            databases.push(found.ok_or("LMDB: no database")?);
        }
        transaction.commit()?;
        Ok(Lmdb { env, databases, buffer: Vec::with_capacity(1 << 20) })
    }
}

impl Peer for Lmdb {
    fn name(&self) -> String {
        "LMDB, written by another process".into()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let which = LENGTHS.iter().position(|one| *one == len).ok_or("no such length")?;
        let Self { env, databases, buffer } = self;
        timed(places, times, |place| {
            let transaction = env.read_txn()?;
            let value = databases[which].get(&transaction, &place)?.ok_or("LMDB: a miss")?;
            buffer.clear();
            buffer.extend_from_slice(value);
            Ok(first_word(buffer))
        })
    }

    fn processes(&self) -> Vec<u32> {
        Vec::new()
    }
}
