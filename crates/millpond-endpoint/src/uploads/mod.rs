//! Multipart uploads in progress.
//!
//! Clients send parts at once and in any order, may replace them, and name the parts of the object at the end. The upload
//! of [`object_store`] takes parts in order. So parts are stored in a file ([`spool`]), and written to the store when the
//! upload is completed, through the same store as all writes. The uploads end with the process.
//!
//! ```text
//! create -> OPEN -> complete -> COMPLETED -> (a while later) dropped
//!           OPEN -> abort, or no request for `upload_age_max` -> dropped
//! ```

mod operations;
mod spool;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path as DirPath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use object_store::path::Path;
use object_store::{Attributes, TagSet};
use s3s::dto::ETag;
use s3s::{S3Result, s3_error};
use tokio::sync::Notify;

use crate::uploads::spool::{SpoolFile, SpoolSpace, SpooledBytes};
use crate::{Error, Limits};

/// A completed upload answers a repeated request for this long: the first reply may have been lost.
const COMPLETED_AGE_MAX: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(crate) struct Uploads {
    dir: PathBuf,
    space: Arc<SpoolSpace>,
    uploads_max: usize,
    age_max: Duration,
    by_id: Mutex<HashMap<String, Arc<Upload>>>,
    created: Notify,
}

#[derive(Debug)]
struct Upload {
    id: String,
    bucket: String,
    path: Path,
    attributes: Attributes,
    tags: TagSet,
    started: SystemTime,
    file: Arc<SpoolFile>,
    progress: Mutex<UploadProgress>,
    /// Held during the completion, so that a repeated request waits for the first one's result.
    completed: tokio::sync::Mutex<Option<Completed>>,
}

#[derive(Debug)]
struct UploadProgress {
    parts: BTreeMap<i32, Arc<UploadedPart>>,
    used: Instant,
    is_completed: bool,
}

#[derive(Debug)]
struct UploadedPart {
    bytes: Arc<SpooledBytes>,
    md5: String,
    received: SystemTime,
}

#[derive(Debug, Clone)]
struct Completed {
    e_tag: Option<ETag>,
    version: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uploads {
    pub(crate) fn new(dir: &DirPath, limits: &Limits) -> Result<Self, Error> {
        let space = SpoolSpace::new(limits.spool_bytes);
        // Finds out now whether the directory can be used.
        SpoolFile::create(dir, &space)
            .map_err(|source| Error::Spool { path: dir.into(), source })?;
        Ok(Self {
            dir: dir.into(),
            space,
            uploads_max: limits.uploads,
            age_max: limits.upload_age_max,
            by_id: Mutex::default(),
            created: Notify::new(),
        })
    }

    /// Waits until there is an upload, completed or not. An idle endpoint needs no timer.
    pub(crate) async fn wait_for_one(&self) {
        while lock(&self.by_id).is_empty() {
            // A creation in between has left a permit.
            self.created.notified().await;
        }
    }

    fn create(
        &self,
        bucket: String,
        path: Path,
        attributes: Attributes,
        tags: TagSet,
    ) -> S3Result<String> {
        let failed = |error| s3_error!(InternalError, "the upload can't be stored: {error}");
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| failed(error.into()))?;
        let id = format!("{:032x}", u128::from_ne_bytes(random));
        let file = SpoolFile::create(&self.dir, &self.space).map_err(failed)?;
        let progress =
            UploadProgress { parts: BTreeMap::new(), used: Instant::now(), is_completed: false };
        let upload = Upload {
            id: id.clone(),
            bucket,
            path,
            attributes,
            tags,
            started: SystemTime::now(),
            file,
            progress: Mutex::new(progress),
            completed: tokio::sync::Mutex::default(),
        };
        let mut by_id = lock(&self.by_id);
        if by_id.len() >= self.uploads_max {
            // A completed upload is remembered only for repeated requests.
            let oldest = by_id.values().filter_map(|upload| {
                let progress = lock(&upload.progress);
                progress.is_completed.then(|| (progress.used, upload.id.clone()))
            });
            let Some((_, oldest)) = oldest.min() else {
                let most = self.uploads_max;
                return Err(s3_error!(
                    ServiceUnavailable,
                    "{most} multipart uploads are in progress, the limit"
                ));
            };
            by_id.remove(&oldest);
        }
        by_id.insert(id.clone(), Arc::new(upload));
        drop(by_id);
        self.created.notify_one();
        Ok(id)
    }

    fn find(&self, bucket: &str, key: &str, id: &str) -> S3Result<Arc<Upload>> {
        let found = lock(&self.by_id).get(id).cloned();
        let found = found.filter(|upload| upload.bucket == bucket && upload.path.as_ref() == key);
        let upload =
            found.ok_or_else(|| s3_error!(NoSuchUpload, "there is no such upload of {key:?}"))?;
        lock(&upload.progress).used = Instant::now();
        Ok(upload)
    }

    /// Drops an upload and its parts.
    pub(crate) fn remove(&self, bucket: &str, key: &str, id: &str) -> S3Result<()> {
        self.find(bucket, key, id)?;
        lock(&self.by_id).remove(id);
        Ok(())
    }

    /// Drops uploads without a recent request.
    pub(crate) fn drop_old(&self) {
        let mut dropped = Vec::new();
        lock(&self.by_id).retain(|_, upload| {
            let progress = lock(&upload.progress);
            let most = if progress.is_completed { COMPLETED_AGE_MAX } else { self.age_max };
            let kept = progress.used.elapsed() < most;
            if !kept {
                dropped.push(Arc::clone(upload));
            }
            kept
        });
        // Frees the parts without the lock.
        drop(dropped);
    }

    /// Uploads of a bucket that are not completed, by key and ID.
    fn open(&self, bucket: &str) -> Vec<Arc<Upload>> {
        let by_id = lock(&self.by_id);
        let open = by_id
            .values()
            .filter(|upload| upload.bucket == bucket && !lock(&upload.progress).is_completed);
        let mut open: Vec<_> = open.cloned().collect();
        open.sort_unstable_by(|a, b| (&a.path, &a.id).cmp(&(&b.path, &b.id)));
        open
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn uploads(limits: &Limits) -> Uploads {
        Uploads::new(&std::env::temp_dir(), limits).unwrap()
    }

    fn create(uploads: &Uploads, key: &str) -> S3Result<String> {
        uploads.create("bucket".into(), Path::from(key), Attributes::new(), TagSet::default())
    }

    #[test]
    fn uploads_are_limited_and_dropped_by_age() {
        let limits = Limits { uploads: 2, upload_age_max: Duration::ZERO, ..Limits::default() };
        let uploads = uploads(&limits);
        let first = create(&uploads, "a").unwrap();
        let second = create(&uploads, "b").unwrap();
        assert_eq!(create(&uploads, "c").unwrap_err().code().as_str(), "ServiceUnavailable");
        lock(&uploads.find("bucket", "a", &first).unwrap().progress).is_completed = true;
        let third = create(&uploads, "c").unwrap();
        assert!(uploads.find("bucket", "a", &first).is_err(), "the completed upload made room");
        assert_eq!(uploads.open("bucket").len(), 2);
        uploads.remove("bucket", "b", &second).unwrap();
        assert!(uploads.find("bucket", "other", &third).is_err());
        assert!(uploads.find("other", "c", &third).is_err());
        uploads.drop_old();
        assert!(uploads.find("bucket", "c", &third).is_err());
    }

    /// Goal: the task that drops old uploads waits while there are none, and does not miss the first one.
    #[test]
    fn an_idle_endpoint_waits_for_an_upload() {
        let mut context = Context::from_waker(Waker::noop());
        let limits = Limits { upload_age_max: Duration::ZERO, ..Limits::default() };
        let uploads = uploads(&limits);
        for _ in 0..2 {
            let mut waiting = pin!(uploads.wait_for_one());
            assert!(waiting.as_mut().poll(&mut context).is_pending());
            create(&uploads, "a").unwrap();
            assert!(waiting.as_mut().poll(&mut context).is_ready());
            assert!(pin!(uploads.wait_for_one()).poll(&mut context).is_ready());
            uploads.drop_old();
        }
    }

    #[test]
    fn a_missing_directory_is_reported() {
        let missing = Uploads::new(DirPath::new("/nonexistent"), &Limits::default()).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent"), "{missing}");
    }
}
