//! memcached on a Unix socket: an item for each place of each length.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use super::{LENGTHS, OBJECT, Peer, first_word, timed};
use crate::process::{Done, Running, await_true};
use crate::synthetic_store::content;

pub struct Memcached {
    server: Running,
    connection: UnixStream,
    buffer: Vec<u8>,
}

impl Memcached {
    pub fn start(dir: &Path, object_bytes: u64) -> Done<Memcached> {
        let socket = dir.join("memcached.sock");
        let mut command = Command::new("memcached");
        command.args(["-u", "root", "-m", "1024", "-I", "4m", "-t", "2", "-s"]).arg(&socket);
        let server = Running::start(&mut command).map_err(|error| format!("memcached: {error}"))?;
        await_true("memcached", || UnixStream::connect(&socket).is_ok())?;
        let mut connection = UnixStream::connect(&socket)?;
        for len in LENGTHS {
            for place in (0..object_bytes).step_by(len) {
                write!(connection, "set {len}:{place} 0 0 {len}\r\n")?;
                connection.write_all(&content(OBJECT, place..place + len as u64))?;
                connection.write_all(b"\r\n")?;
                let mut answer = [0; 8];
                connection.read_exact(&mut answer)?;
                if &answer != b"STORED\r\n" {
                    return Err(format!("memcached: {}", String::from_utf8_lossy(&answer)).into());
                }
            }
        }
        Ok(Memcached { server, connection, buffer: vec![0; (1 << 20) + 4096] })
    }
}

impl Peer for Memcached {
    fn name(&self) -> String {
        "memcached".into()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let Self { connection, buffer, .. } = self;
        timed(places, times, |place| {
            connection.write_all(format!("get {len}:{place}\r\n").as_bytes())?;
            let mut filled = 0;
            let head = loop {
                let read = connection.read(&mut buffer[filled..])?;
                filled += read;
                if let Some(head) = buffer[..filled].windows(2).position(|end| end == b"\r\n") {
                    break head + 2;
                }
                if read == 0 {
                    return Err("memcached: the connection ended".into());
                }
            };
            if !buffer.starts_with(b"VALUE") {
                return Err("memcached: a miss".into());
            }
            // The end is "\r\nEND\r\n".
            let all = head + len + 7;
            connection.read_exact(&mut buffer[filled..all])?;
            Ok(first_word(&buffer[head..]))
        })
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.server.id()]
    }
}
