//! ListObjects and ListObjectsV2.
//!
//! S3 lists in the order of keys, from any key and below any prefix. [`ObjectStore::list`] has no defined order, and its
//! prefixes are whole folders. So a page is the smallest keys of the folder's whole list that are above the last page;
//! only these are kept in memory. A store with paginated lists ([`Builder::lists`](crate::Builder::lists)) serves pages
//! itself.
//!
//! [`ObjectStore::list`]: object_store::ObjectStore::list

use std::collections::BTreeMap;

use futures_util::StreamExt;
use object_store::list::PaginatedListOptions;
use object_store::path::Path;
use object_store::{ListResult, ObjectMeta};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3Response, S3Result, s3_error};

use crate::attributes::timestamp;
use crate::bucket::{Bucket as StoreBucket, path_of};
use crate::failures::failure;
use crate::gateway::Gateway;

/// Keys of a page.
const KEYS_MAX: i32 = 1000;
/// What stays as it is in keys with `encoding-type=url`.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');
/// The first character of a continuation token: the last key of a page, or a token of the store.
const AFTER_KEY: &str = "k";
const OF_STORE: &str = "s";

/// Which page of which list.
#[derive(Debug, Clone)]
struct ListQuery {
    prefix: String,
    delimiter: Option<String>,
    /// Keys up to this one are left out.
    after: String,
    /// Continues after a common prefix, whose keys are left out, too.
    continues: bool,
    of_store: Option<String>,
    keys: usize,
}

#[derive(Debug, Default)]
struct ListPage {
    /// Objects, or None for a common prefix.
    entries: BTreeMap<String, Option<ObjectMeta>>,
    /// The continuation token, if the list goes on.
    next: Option<String>,
}

impl ListPage {
    /// Keeps the smallest entries: one more than the page has, to know whether the list goes on.
    fn add(&mut self, query: &ListQuery, key: String, meta: Option<ObjectMeta>) {
        self.entries.entry(key).or_insert(meta);
        if self.entries.len() > query.keys + 1 {
            self.entries.pop_last();
        }
    }

    fn cut(mut self, query: &ListQuery) -> Self {
        if self.entries.len() > query.keys {
            self.entries.pop_last();
            let last = self.entries.last_key_value();
            self.next = last.map(|(key, _)| format!("{AFTER_KEY}{}", hex(key)));
        }
        self
    }
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<String> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    let bytes = (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok());
    String::from_utf8(bytes.collect::<Option<_>>()?).ok()
}

impl ListQuery {
    fn new(
        prefix: Option<String>,
        delimiter: Option<String>,
        after: Option<String>,
        keys: Option<i32>,
    ) -> S3Result<Self> {
        let keys = keys.unwrap_or(KEYS_MAX);
        let keys = usize::try_from(keys.min(KEYS_MAX));
        Ok(Self {
            prefix: prefix.unwrap_or_default(),
            delimiter: delimiter.filter(|delimiter| !delimiter.is_empty()),
            after: after.unwrap_or_default(),
            continues: false,
            of_store: None,
            keys: keys.map_err(|_| s3_error!(InvalidArgument, "max-keys is negative"))?,
        })
    }

    fn continue_from(&mut self, token: &str) -> S3Result<()> {
        let failed =
            || s3_error!(InvalidArgument, "the continuation token is not of this endpoint");
        let (kind, text) = token.split_at_checked(1).ok_or_else(failed)?;
        let text = from_hex(text).ok_or_else(failed)?;
        match kind {
            AFTER_KEY => (self.after, self.continues) = (text, true),
            OF_STORE => self.of_store = Some(text),
            _ => return Err(failed()),
        }
        Ok(())
    }

    /// The folder that has all keys with the prefix; None if no key can have it.
    fn folder(&self) -> Option<Option<Path>> {
        match self.prefix.rsplit_once('/') {
            None => Some(None),
            Some((folder, _)) => path_of(folder).map(Some),
        }
    }

    /// The common prefix of a key; none of a key without the prefix of the list.
    fn rolled_up<'a>(&self, key: &'a str) -> Option<&'a str> {
        let delimiter = self.delimiter.as_deref()?;
        let found = key.strip_prefix(&self.prefix)?.find(delimiter)?;
        Some(&key[..self.prefix.len() + found + delimiter.len()])
    }

    fn is_after(&self, key: &str) -> bool {
        key > self.after.as_str()
            // All keys of a common prefix belong to its page.
            && !(self.continues && self.rolled_up(&self.after).is_some_and(|last| last == self.after && key.starts_with(last)))
    }
}

async fn page(bucket: &StoreBucket, query: &ListQuery) -> S3Result<ListPage> {
    let mut page = ListPage::default();
    if query.keys == 0 {
        return Ok(page);
    }
    if let Some(lists) = &bucket.lists {
        let options = PaginatedListOptions {
            offset: (!query.after.is_empty()).then(|| query.after.clone()),
            delimiter: query.delimiter.clone().map(Into::into),
            max_keys: Some(query.keys),
            page_token: query.of_store.clone(),
            ..PaginatedListOptions::default()
        };
        let prefix = (!query.prefix.is_empty()).then_some(query.prefix.as_str());
        let listed = lists.list_paginated(prefix, options).await.map_err(failure)?;
        page.next = listed.page_token.map(|token| format!("{OF_STORE}{}", hex(&token)));
        let ListResult { objects, common_prefixes, .. } = listed.result;
        page.entries.extend(common_prefixes.iter().map(|prefix| (format!("{prefix}/"), None)));
        page.entries
            .extend(objects.into_iter().map(|meta| (meta.location.to_string(), Some(meta))));
        return Ok(page);
    }
    let Some(folder) = query.folder() else { return Ok(page) };
    if query.delimiter.as_deref() == Some("/") {
        let ListResult { objects, common_prefixes, .. } =
            bucket.store.list_with_delimiter(folder.as_ref()).await.map_err(failure)?;
        for meta in objects {
            let key = meta.location.to_string();
            if key.starts_with(&query.prefix) && query.is_after(&key) {
                page.add(query, key, Some(meta));
            }
        }
        for path in common_prefixes {
            let key = format!("{path}/");
            if key.starts_with(&query.prefix)
                && common_prefix_follows(bucket, query, &path, &key).await?
            {
                page.add(query, key, None);
            }
        }
        return Ok(page.cut(query));
    }
    // The store may start after the last key, if that has a path.
    let mut listed = match path_of(&query.after) {
        Some(after) => bucket.store.list_with_offset(folder.as_ref(), &after),
        None => bucket.store.list(folder.as_ref()),
    };
    while let Some(meta) = listed.next().await {
        let meta = meta.map_err(failure)?;
        let key = meta.location.to_string();
        if !key.starts_with(&query.prefix) || !query.is_after(&key) {
            continue;
        }
        match query.rolled_up(&key) {
            Some(prefix) => page.add(query, prefix.to_owned(), None),
            None => page.add(query, key, Some(meta)),
        }
    }
    Ok(page.cut(query))
}

/// Whether a folder has keys after `query.after`.
async fn common_prefix_follows(
    bucket: &StoreBucket,
    query: &ListQuery,
    path: &Path,
    key: &str,
) -> S3Result<bool> {
    if key > query.after.as_str() {
        return Ok(true);
    }
    if query.continues || !query.after.starts_with(key) {
        return Ok(false);
    }
    // `start-after` lies within the folder.
    let mut listed = bucket.store.list(Some(path));
    while let Some(meta) = listed.next().await {
        if meta.map_err(failure)?.location.as_ref() > query.after.as_str() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Keys as they are, or percent-encoded if the client asks for it.
fn encoder(encoding: Option<&EncodingType>) -> impl Fn(&str) -> String + use<> {
    let url = encoding.is_some_and(|encoding| encoding.as_str() == EncodingType::URL);
    move |text| if url { utf8_percent_encode(text, ENCODED).to_string() } else { text.to_owned() }
}

fn contents(
    bucket: &StoreBucket,
    page: ListPage,
    encode: impl Fn(&str) -> String,
) -> (Vec<Object>, Vec<CommonPrefix>) {
    let (mut objects, mut prefixes) = (Vec::new(), Vec::new());
    for (key, meta) in page.entries {
        let key = encode(&key);
        match meta {
            None => prefixes.push(CommonPrefix { prefix: Some(key) }),
            Some(meta) => objects.push(Object {
                e_tag: bucket.e_tag(meta.e_tag.as_deref()),
                key: Some(key),
                last_modified: Some(timestamp(meta.last_modified)),
                size: i64::try_from(meta.size).ok(),
                storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
                ..Object::default()
            }),
        }
    }
    (objects, prefixes)
}

impl Gateway {
    pub(crate) async fn list_v2(
        &self,
        input: ListObjectsV2Input,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let bucket = self.bucket(&input.bucket)?;
        let mut query = ListQuery::new(
            input.prefix,
            input.delimiter,
            input.start_after.clone(),
            input.max_keys,
        )?;
        if let Some(token) = &input.continuation_token {
            query.continue_from(token)?;
        }
        let page = page(bucket, &query).await?;
        let encode = encoder(input.encoding_type.as_ref());
        let next = page.next.clone();
        let (objects, prefixes) = contents(bucket, page, &encode);
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(encode(&query.prefix)),
            delimiter: query.delimiter.as_deref().map(&encode),
            max_keys: Some(query.keys as i32),
            key_count: Some((objects.len() + prefixes.len()) as i32),
            continuation_token: input.continuation_token,
            start_after: input.start_after.as_deref().map(&encode),
            is_truncated: Some(next.is_some()),
            next_continuation_token: next,
            contents: Some(objects),
            common_prefixes: Some(prefixes),
            encoding_type: input.encoding_type,
            ..ListObjectsV2Output::default()
        }))
    }

    pub(crate) async fn list_v1(
        &self,
        input: ListObjectsInput,
    ) -> S3Result<S3Response<ListObjectsOutput>> {
        let bucket = self.bucket(&input.bucket)?;
        let mut query =
            ListQuery::new(input.prefix, input.delimiter, input.marker.clone(), input.max_keys)?;
        // The marker of the next page may be a common prefix.
        query.continues = true;
        let page = page(bucket, &query).await?;
        let encode = encoder(input.encoding_type.as_ref());
        let is_truncated = page.next.is_some();
        let next =
            page.entries.last_key_value().filter(|_| is_truncated).map(|(key, _)| encode(key));
        let (objects, prefixes) = contents(bucket, page, &encode);
        Ok(S3Response::new(ListObjectsOutput {
            name: Some(input.bucket),
            prefix: Some(encode(&query.prefix)),
            delimiter: query.delimiter.as_deref().map(&encode),
            marker: Some(encode(&input.marker.unwrap_or_default())),
            max_keys: Some(query.keys as i32),
            is_truncated: Some(is_truncated),
            next_marker: next,
            contents: Some(objects),
            common_prefixes: Some(prefixes),
            encoding_type: input.encoding_type,
            ..ListObjectsOutput::default()
        }))
    }
}
