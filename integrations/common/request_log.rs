//! The requests that the store's server has received.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use super::{Done, variable};

/// Numbers of requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Requests {
    /// For bytes of objects.
    pub gets: u64,
    /// For metadata of objects.
    pub heads: u64,
    pub lists: u64,
    /// Writes and deletions.
    pub writes: u64,
}

impl Requests {
    /// All that read objects.
    pub fn reads(&self) -> u64 {
        self.gets + self.heads
    }
}

/// The access log of versitygw: a line for each request.
pub struct RequestLog {
    path: PathBuf,
    /// The part that was counted.
    end: u64,
}

impl RequestLog {
    pub fn from_environment() -> Done<RequestLog> {
        let path = PathBuf::from(variable("MILLPOND_STORE_LOG")?);
        let end = path.metadata()?.len();
        Ok(RequestLog { path, end })
    }

    /// The requests since the last call.
    pub fn take(&mut self) -> Done<Requests> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.end))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // The last line may be incomplete.
        text.truncate(text.rfind('\n').map_or(0, |at| at + 1));
        self.end += text.len() as u64;
        let mut found = Requests::default();
        // OWNER BUCKET [DATE ZONE] ADDRESS REQUESTER REQUEST OPERATION ...
        for operation in text.lines().filter_map(|line| line.split(' ').nth(7)) {
            match operation {
                "s3_GetObject" => found.gets += 1,
                "s3_HeadObject" => found.heads += 1,
                "s3_ListObjectsV2" => found.lists += 1,
                _ => found.writes += 1,
            }
        }
        Ok(found)
    }
}
