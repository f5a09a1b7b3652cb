//! Tests the verdicts on correct stores, and on stores that each break one promise.

mod common;

use std::sync::Arc;

use common::{Bad, Flaw};
use millpond_store_check::{Endpoint, Options, Report, Verdict, check, open};
use object_store::memory::InMemory;

async fn checked(endpoints: Vec<Endpoint>) -> Report {
    check(&endpoints, &Options { rounds: 20, ..Options::default() }).await.unwrap()
}

fn with(report: &Report, verdict: Verdict) -> Vec<&'static str> {
    report.promises.iter().filter(|p| p.verdict == verdict).map(|p| p.name).collect()
}

async fn through_two(flaw: Flaw) -> Report {
    let store = Arc::new(InMemory::new());
    let endpoint = |name| Endpoint::new(name, Arc::new(Bad { store: Arc::clone(&store), flaw }));
    checked(vec![endpoint("one"), endpoint("two")]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_in_memory_keeps_all_promises() {
    let endpoints = open("memory:///", &[], &Options::default()).await.unwrap();
    let report = checked(endpoints).await;
    assert_eq!(with(&report, Verdict::NotTried), ["lost_replies"], "{report}");
    assert_eq!(with(&report, Verdict::Kept).len(), 7, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_offers_creates_and_no_updates() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}", dir.path().display());
    let report = checked(open(&url, &[], &Options::default()).await.unwrap()).await;
    let not_offered = ["metadata", "stale_update", "racing_updates"];
    assert_eq!(with(&report, Verdict::NotOffered), not_offered, "{report}");
    assert!(!report.has(Verdict::Broken) && report.is_kept("racing_creates"), "{report}");
    let left = dir.path().read_dir().unwrap().flatten().count();
    assert!(left <= 1 && report.notes.is_empty(), "{left} {report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_stores_are_detected() {
    for (flaw, broken) in [
        (Flaw::None, &[][..]),
        (
            Flaw::IgnoresConditions,
            &["create_twice", "racing_creates", "stale_update", "racing_updates"],
        ),
        // A check without races would find no violation.
        (Flaw::ChecksThenWrites, &["racing_creates", "racing_updates"]),
        (Flaw::RefusesAndWrites, &["create_twice", "racing_creates"]),
        (Flaw::IgnoresConditionsOfReads, &["conditional_reads"]),
        (Flaw::DropsMetadata, &["metadata"]),
        (Flaw::ReadsStale, &["read_after_write"]),
    ] {
        let report = through_two(flaw).await;
        let found = with(&report, Verdict::Broken);
        assert!(broken.iter().all(|name| found.contains(name)), "{flaw:?}: {report}");
        let expected = if flaw == Flaw::ReadsStale { found.len() } else { broken.len() };
        assert_eq!(found.len(), expected, "{flaw:?}: {report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_always_undecided_promise_is_not_kept() {
    let report = through_two(Flaw::Conflicts).await;
    assert!(!report.is_kept("racing_creates") && !report.is_kept("racing_updates"), "{report}");
}

#[tokio::test]
async fn bad_urls_are_rejected_with_a_reason() {
    let options = Options::default();
    for (url, reason) in [
        ("bucket", "is not a URL"),
        ("ftp://there", "use s3, file or memory"),
        ("file://relative", "no absolute path"),
        ("file:///not/there/at/all", "not/there"),
        ("memory:///path", "no path"),
    ] {
        let error = open(url, &[], &options).await.unwrap_err();
        assert!(error.contains(reason), "{url}: {error}");
    }
    let endpoints = ["http://localhost".to_owned()];
    assert!(open("memory:///", &endpoints, &options).await.unwrap_err().contains("for s3://"));
}
