use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::discovery::{FleetBuilder, Found, PodFiles, watch_files};
use crate::fleet::Fleet;
use crate::knobs::PdKnobs;

fn files(path: &Path) -> PodFiles {
    PodFiles::new(path, Arc::new(PdKnobs::default()))
}

fn manifest(name: &str, ip: &str) -> String {
    format!("metadata: {{name: {name}, labels: {{model.aibrix.ai/name: m}}}}\nstatus: {{podIP: {ip}}}\n")
}

/// `name@host` of every pod.
fn pods(found: &Found) -> Vec<String> {
    found.specs.iter().map(|spec| format!("{}@{}", spec.key.name, spec.host)).collect()
}

#[test]
fn a_single_file_is_followed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods.txt");
    let mut watched = files(&path);
    let missing = watched.poll_once().unwrap();
    assert_eq!((missing.specs.len(), missing.problems.len()), (0, 1));
    assert_eq!(watched.poll_once(), None, "nothing new");

    std::fs::write(&path, manifest("a", "10.0.0.1")).unwrap();
    let found = watched.poll_once().unwrap();
    assert_eq!((pods(&found), found.problems), (vec!["a@10.0.0.1".to_owned()], Vec::new()));
    assert_eq!(watched.poll_once(), None);
    std::fs::write(&path, manifest("a", "10.0.0.2")).unwrap();
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.2"], "same length, same second");

    std::fs::remove_file(&path).unwrap();
    for _ in 0..3 {
        if let Some(found) = watched.poll_once() {
            assert_eq!(
                pods(&found),
                ["a@10.0.0.2"],
                "a file named on the command line never empties the fleet by going away"
            );
            assert_eq!(found.problems.len(), 1);
        }
    }
}

#[test]
fn a_change_of_nothing_but_comments_is_no_news() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods.yaml");
    std::fs::write(&path, manifest("a", "10.0.0.1")).unwrap();
    let mut watched = files(&path);
    watched.poll_once().unwrap();
    std::fs::write(&path, format!("# hello\n{}", manifest("a", "10.0.0.1"))).unwrap();
    assert_eq!(watched.poll_once(), None);
}

#[test]
fn r44_directories_add_change_and_remove() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let mut watched = files(directory.path());
    assert_eq!(watched.poll_once(), Some(Found::default()), "an empty directory is an empty fleet");
    std::fs::write(at("b.yaml"), manifest("b", "10.0.0.2")).unwrap();
    std::fs::write(at("a.yml"), manifest("a", "10.0.0.1")).unwrap();
    std::fs::write(at("c.json"), r#"{"metadata": {"name": "c", "labels": {"model.aibrix.ai/name": "m"}}}"#).unwrap();
    std::fs::write(at(".hidden.yaml"), manifest("h", "10.0.0.9")).unwrap();
    std::fs::write(at("notes.txt"), manifest("n", "10.0.0.9")).unwrap();
    std::fs::create_dir(at("sub.yaml")).unwrap();
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.1", "b@10.0.0.2", "c@"]);

    std::fs::remove_file(at("a.yml")).unwrap();
    assert_eq!(watched.poll_once(), None, "an editor's rename looks like this for a moment");
    assert_eq!(pods(&watched.poll_once().unwrap()), ["b@10.0.0.2", "c@"]);

    std::fs::write(at("b.yaml"), manifest("b", "10.0.0.3").replace("name: b,", "name: b, uid: new,")).unwrap();
    let found = watched.poll_once().unwrap();
    assert_eq!((pods(&found)[0].as_str(), &*found.specs[0].uid), ("b@10.0.0.3", "new"));
}

#[test]
fn a_file_that_is_empty_for_a_moment_keeps_its_pods() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods.yaml");
    std::fs::write(&path, manifest("a", "10.0.0.1")).unwrap();
    let mut watched = files(directory.path());
    watched.poll_once().unwrap();
    std::fs::write(&path, "").unwrap();
    assert_eq!(watched.poll_once(), None);
    std::fs::write(&path, manifest("a", "10.0.0.1")).unwrap();
    assert_eq!(watched.poll_once(), None);
    std::fs::write(&path, " \n").unwrap();
    assert_eq!(watched.poll_once(), None, "the earlier moment does not count");
    assert_eq!(watched.poll_once(), Some(Found::default()));
}

#[test]
fn half_a_file_is_not_a_smaller_fleet() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods.yaml");
    let whole = format!("{}---\n{}", manifest("a", "10.0.0.1"), manifest("b", "10.0.0.2"));
    let mut watched = files(&path);
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.1", "b@10.0.0.2"]);
    // Wherever a writer was interrupted, the fleet stays as it was, and the finished file is no news.
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        let found = watched.poll_once();
        assert!(found.is_none_or(|found| pods(&found).len() == 2), "after {length} bytes");
        std::fs::write(&path, &whole).unwrap();
        if let Some(found) = watched.poll_once() {
            assert_eq!(pods(&found), ["a@10.0.0.1", "b@10.0.0.2"], "after {length} bytes");
        }
    }
    // New pods and new addresses count at once.
    std::fs::write(&path, whole.replace("10.0.0.2", "10.0.0.3") + "---\n" + &manifest("c", "10.0.0.4")).unwrap();
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.1", "b@10.0.0.3", "c@10.0.0.4"]);
}

#[cfg(unix)]
#[test]
fn a_mounted_configmap_is_followed_through_its_links() {
    use std::os::unix::fs::symlink;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (version, ip) in [("..v1", "10.0.0.1"), ("..v2", "10.0.0.2")] {
        std::fs::create_dir(at(version)).unwrap();
        std::fs::write(at(version).join("pods.yaml"), manifest("a", ip)).unwrap();
    }
    symlink("..v1", at("..data")).unwrap();
    symlink("..data/pods.yaml", at("pods.yaml")).unwrap();
    let mut watched = files(directory.path());
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.1"]);
    symlink("..v2", at("..data_tmp")).unwrap();
    std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
    assert_eq!(pods(&watched.poll_once().unwrap()), ["a@10.0.0.2"]);
}

#[test]
fn a_broken_document_leaves_the_last_good_version_of_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.yaml"), directory.path().join("y.yaml"));
    std::fs::write(&x, format!("{}---\n{}", manifest("a", "10.0.0.1"), manifest("b", "10.0.0.2"))).unwrap();
    std::fs::write(&y, manifest("c", "10.0.0.3")).unwrap();
    let mut watched = files(directory.path());
    watched.poll_once().unwrap();

    std::fs::write(&x, format!("{}---\n{}", manifest("a", "10.9.9.9"), manifest("b", "[7"))).unwrap();
    std::fs::write(&y, manifest("c", "10.0.0.4")).unwrap();
    let found = watched.poll_once().unwrap();
    assert_eq!(pods(&found), ["a@10.0.0.1", "b@10.0.0.2", "c@10.0.0.4"]);
    assert_eq!(found.problems.len(), 1);
    assert!(found.problems[0].contains("x.yaml") && found.problems[0].contains("(pod b)"), "{:?}", found.problems);

    std::fs::write(&x, manifest("a", "10.9.9.9")).unwrap();
    assert_eq!(watched.poll_once(), None, "a pod less is believed when it is seen twice");
    let found = watched.poll_once().unwrap();
    assert_eq!((pods(&found), found.problems.len()), (vec!["a@10.9.9.9".to_owned(), "c@10.0.0.4".to_owned()], 0));

    std::fs::write(&x, [0xff, 0xfe]).unwrap();
    let found = watched.poll_once().unwrap();
    assert_eq!((pods(&found).len(), found.problems.len()), (2, 1));
}

#[test]
fn without_a_good_version_the_readable_documents_count() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.yaml");
    std::fs::write(&path, format!("{}---\nmetadata: [\n", manifest("a", "10.0.0.1"))).unwrap();
    let found = files(&path).poll_once().unwrap();
    assert_eq!((pods(&found), found.problems.len()), (vec!["a@10.0.0.1".to_owned()], 1));
}

#[test]
fn of_two_pods_with_one_key_the_first_file_by_name_wins() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("b.yaml"), manifest("a", "10.0.0.2")).unwrap();
    std::fs::write(directory.path().join("a.yaml"), manifest("a", "10.0.0.1")).unwrap();
    let found = files(directory.path()).poll_once().unwrap();
    assert_eq!(pods(&found), ["a@10.0.0.1"]);
    assert_eq!(found.problems, ["b.yaml: pod default/a is already in a.yaml; the first counts"]);
}

#[test]
fn r51_port_label_and_bootstrap_annotation_arrive_with_the_next_look() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.yaml");
    let text = |port: u16, bootstrap: u16| {
        format!(
            "metadata:\n  name: a\n  labels: {{model.aibrix.ai/name: m, model.aibrix.ai/port: '{port}'}}\n  \
             annotations: {{model.aibrix.ai/sglang-bootstrap-port: '{bootstrap}'}}\nstatus: {{podIP: 10.0.0.1}}"
        )
    };
    let mut watched = files(&path);
    for (port, bootstrap) in [(8000, 8998), (9000, 8998), (9000, 9998)] {
        std::fs::write(&path, text(port, bootstrap)).unwrap();
        let found = watched.poll_once().unwrap();
        assert_eq!((found.specs[0].port, found.specs[0].bootstrap_port), (port, bootstrap));
    }
}

#[tokio::test]
async fn the_watcher_feeds_the_builder_and_stops() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a.yaml"), manifest("a", "10.0.0.1")).unwrap();
    let builder = Arc::new(FleetBuilder::new(Arc::new(Fleet::default()), Vec::new()));
    let mut versions = builder.subscribe();
    let (tracker, cancel) = (TaskTracker::new(), CancellationToken::new());
    watch_files(files(directory.path()), Arc::clone(&builder), Duration::from_millis(1), &tracker, cancel.clone())
        .await;
    assert_eq!(builder.fleet().load().model("m").unwrap().pods.len(), 1, "the first look is done on return");
    versions.borrow_and_update();

    std::fs::write(directory.path().join("b.yaml"), manifest("b", "10.0.0.2")).unwrap();
    tokio::time::timeout(Duration::from_secs(20), versions.wait_for(|version| *version >= 2)).await.unwrap().unwrap();
    assert_eq!(builder.fleet().load().model("m").unwrap().pods.len(), 2);

    cancel.cancel();
    tracker.close();
    tokio::time::timeout(Duration::from_secs(20), tracker.wait()).await.unwrap();
}
