//! The model: a read returns the store's response for one version that was current at a permitted moment.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, Result};

use crate::below::{Entry, Options, Tags};

/// Maximum age of the version that a read returns.
#[derive(Clone, Copy, Debug)]
pub enum Age {
    Most(Duration),
    Any,
}

/// A read, with its start and end.
pub struct Call<'a> {
    pub options: &'a Options,
    pub age: Age,
    pub log: &'a [Entry],
    /// The entry of the last write through the same cache that had completed when the read started.
    pub oldest: usize,
    /// A write through the same cache ran during the read, even if it changed nothing.
    pub is_beside_write: bool,
    pub start: Instant,
    pub end: Instant,
}

/// A response whose body has been read.
pub struct Answer {
    pub meta: ObjectMeta,
    pub range: Range<u64>,
    pub bytes: Vec<u8>,
    /// The body ended with an error.
    pub error: Option<Error>,
    /// The caller did not read the whole body.
    pub is_dropped: bool,
}

impl Answer {
    /// Reads the body, or `pieces` of it.
    pub async fn read(result: GetResult, pieces: usize) -> Answer {
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let mut answer = Answer { meta, range, bytes: Vec::new(), error: None, is_dropped: false };
        let mut stream = result.into_stream();
        for _ in 0..pieces {
            match stream.next().await {
                Some(Ok(bytes)) => answer.bytes.extend_from_slice(&bytes),
                Some(Err(error)) => answer.error = Some(error),
                None => return answer,
            }
        }
        answer.is_dropped = true;
        answer
    }
}

impl Call<'_> {
    /// Whether the entry was current at a moment that `age` permits.
    fn permits(&self, at: usize, age: Age) -> bool {
        let until = self.log.get(at + 1).map(|next| next.at);
        let is_young = match age {
            Age::Any => true,
            // The cache counts milliseconds.
            Age::Most(age) => until.is_none_or(|until| {
                until + age + Duration::from_millis(if age.is_zero() { 0 } else { 1 }) >= self.start
            }),
        };
        self.log[at].at <= self.end && is_young
    }

    /// The versions that the read may return: its named version, or the versions that `age` permits.
    fn versions<'a>(
        &'a self,
        named: &'a Option<String>,
    ) -> impl Iterator<Item = (&'a Bytes, &'a ObjectMeta)> {
        let is_permitted = move |at: &usize| match named {
            Some(_) => self.log[*at].at <= self.end,
            None => *at >= self.oldest && self.permits(*at, self.age),
        };
        let permitted = (0..self.log.len()).filter(is_permitted);
        let objects = permitted.filter_map(|at| self.log[at].object.as_ref());
        let is_named = move |meta: &ObjectMeta| named.is_none() || meta.version == *named;
        objects.filter(move |(_, meta)| is_named(meta)).map(|(bytes, meta)| (bytes, meta))
    }

    /// Whether metadata may be the cache's metadata of a version. With content ETags, metadata of other versions with the
    /// same content are permitted, too.
    fn same<'a>(&'a self, meta: &'a ObjectMeta) -> impl Iterator<Item = &'a ObjectMeta> {
        let is_kept = self.options.tags == Tags::OfContent;
        let others = self.log.iter().filter_map(|entry| entry.object.as_ref());
        let others = others.map(|(_, other)| other);
        let others = others.filter(move |other| is_kept && other.e_tag == meta.e_tag);
        std::iter::once(meta).chain(others)
    }

    fn is_of(&self, meta: &ObjectMeta, got: &ObjectMeta) -> bool {
        (&meta.location, meta.size, &meta.e_tag, &meta.version)
            == (&got.location, got.size, &got.e_tag, &got.version)
            && self.same(meta).any(|meta| meta.last_modified == got.last_modified)
    }

    fn is_replaced(&self) -> bool {
        self.log.iter().any(|entry| (self.start..=self.end).contains(&entry.at))
    }

    /// An error that the store may have returned.
    fn check_error(&self, error: &Error, options: &GetOptions, ranges: &[Range<u64>]) -> bool {
        let text = error.to_string();
        let is_of_store = text.contains("injected") || text.contains("announced ones");
        if self.options.faults > 0 && is_of_store {
            return true;
        }
        let gives = |given: Result<()>| {
            given
                .is_err_and(|given| std::mem::discriminant(&given) == std::mem::discriminant(error))
        };
        match error {
            Error::NotFound { .. } => {
                let now = Age::Most(Duration::ZERO);
                let is_absent = |at: &usize| self.log[*at].object.is_none();
                options.version.is_some()
                    || (0..self.log.len()).filter(is_absent).any(|at| self.permits(at, now))
            }
            Error::Precondition { .. } | Error::NotModified { .. } => self
                .versions(&options.version)
                .flat_map(|(_, meta)| self.same(meta))
                .any(|meta| gives(options.check_preconditions(meta))),
            Error::Generic { .. } => self.versions(&options.version).any(|(_, meta)| {
                let ranges = ranges.iter().cloned().map(GetRange::Bounded);
                let mut ranges = ranges.chain(options.range.clone());
                ranges.any(|range| range.as_range(meta.size).is_err())
            }),
            _ => false,
        }
    }

    pub fn check_get(&self, options: &GetOptions, got: &Result<Answer>) -> Result<(), String> {
        let got = match got {
            Ok(got) => got,
            Err(error) if self.check_error(error, options, &[]) => return Ok(()),
            Err(error) => return Err(format!("the store does not return {error:?}")),
        };
        let mut why = "no permitted version has this meta".to_owned();
        for (bytes, meta) in
            self.versions(&options.version).filter(|(_, meta)| self.is_of(meta, &got.meta))
        {
            why = match self.check_version(bytes, meta, options, got) {
                Ok(()) => return Ok(()),
                Err(why) => why,
            };
        }
        let (meta, range, len) = (&got.meta, &got.range, got.bytes.len());
        Err(format!("{why}: {meta:?}, range {range:?}, {len} bytes, error {:?}", got.error))
    }

    fn check_version(
        &self,
        bytes: &Bytes,
        meta: &ObjectMeta,
        options: &GetOptions,
        got: &Answer,
    ) -> Result<(), String> {
        if !self.options.ignores_conditions
            // With the time in the caller's response, which `is_of` has checked.
            && let Err(error) = options.check_preconditions(&got.meta)
        {
            return Err(format!("a condition does not hold ({error})"));
        }
        if options.head {
            return Ok(());
        }
        let range = match &options.range {
            None => 0..meta.size,
            Some(range) => range.as_range(meta.size).map_err(|error| error.to_string())?,
        };
        if range != got.range {
            return Err(format!("the range is {range:?}"));
        }
        let expected = &bytes[range.start as usize..range.end as usize];
        match &got.error {
            None if !got.is_dropped && got.bytes.len() == expected.len() => {}
            // The store injects early ends of bodies.
            None if !got.is_dropped && self.options.faults > 0 => {}
            None if !got.is_dropped => return Err(format!("{} bytes", expected.len())),
            Some(error) if self.check_error(error, &GetOptions::new(), &[]) => {}
            Some(Error::Precondition { .. } | Error::Generic { .. }) => {
                // A long read fails so when its version is no longer current. If the store ignores conditions, it is the
                // store's error for a range past the end of the next version.
                let current = self.log.iter().rposition(|entry| entry.at <= self.end);
                let now = current.and_then(|at| self.log[at].object.as_ref());
                // Without ETag and version, the cache can't know whether a write beside the read has changed the object.
                let may_differ = self.options.tags == Tags::Nothing && self.is_beside_write;
                if !may_differ && now.is_some_and(|(_, now)| std::ptr::eq(now, meta)) {
                    return Err("the version is still current".into());
                }
            }
            Some(_) => return Err("the error is none of the store's".into()),
            None => {}
        }
        if expected.get(..got.bytes.len()) != Some(&got.bytes) {
            return Err("the bytes are not those of the version".into());
        }
        Ok(())
    }

    pub fn check_ranges(
        &self,
        ranges: &[Range<u64>],
        got: &Result<Vec<Bytes>>,
    ) -> Result<(), String> {
        let got = match got {
            Ok(got) => got,
            Err(error) if self.check_error(error, &GetOptions::new(), ranges) => return Ok(()),
            // The object was replaced repeatedly while its ranges were read.
            Err(Error::Precondition { .. }) if self.is_replaced() => return Ok(()),
            Err(error) => return Err(format!("the store does not return {error:?}")),
        };
        let is_of = |(bytes, meta): (&Bytes, &ObjectMeta)| {
            ranges.len() == got.len()
                && ranges.iter().zip(got).all(|(range, got)| {
                    let range = GetRange::Bounded(range.clone()).as_range(meta.size);
                    range.is_ok_and(|range| {
                        bytes[range.start as usize..range.end as usize] == got[..]
                    })
                })
        };
        if ranges.is_empty() && got.is_empty() || self.versions(&None).any(is_of) {
            return Ok(());
        }
        let lens: Vec<_> = got.iter().map(Bytes::len).collect();
        Err(format!("no permitted version has these bytes, of lengths {lens:?}"))
    }
}
