//! Files that change.

use super::*;
use crate::tls::reload::testing::watcher;

const DONE: &str = r#"tandem_tls_reloads_total{listener="grpc",result="done"}"#;
const FAILED: &str = r#"tandem_tls_reloads_total{listener="grpc",result="failed"}"#;
const EXPIRY: &str = r#"tandem_tls_certificate_expiry_timestamp_seconds{listener="grpc"}"#;

/// The files in use, and what the metrics say of them: reloads, failures, and whether there is a problem.
struct Scene {
    made: Made,
    server: Arc<Server>,
    metrics: Arc<Metrics>,
}

impl Scene {
    fn new(client_ca: Option<&str>) -> Option<Scene> {
        let made = Made::new()?;
        made.certificate("new", "ca");
        let metrics = metrics();
        let server = Server::load(Listener::Grpc, &made.files("server", client_ca), &metrics, Clock::system()).unwrap();
        Some(Scene { made, server, metrics })
    }

    fn replace(&self, from: &str, to: &str) {
        copy(&self.made.path(from), &self.made.path(to));
    }

    fn seen(&self) -> (i64, i64, bool) {
        let count = |series| value(&self.metrics, series).unwrap();
        (count(DONE), count(FAILED), self.server.problem().is_some())
    }
}

#[test]
fn files_that_are_replaced_one_by_one_are_taken_when_they_fit() {
    let Some(scene) = Scene::new(None) else { return };
    let mut look = watcher(&scene.server);
    let first = scene.server.config();
    look();
    assert_eq!(scene.seen(), (0, 0, false));
    assert!(Arc::ptr_eq(&first, &scene.server.config()));
    scene.replace("new.crt", "server.crt");
    look();
    // Half of it: perhaps the other half is on its way.
    assert_eq!(scene.seen(), (0, 0, false));
    scene.replace("new.key", "server.key");
    look();
    assert_eq!(scene.seen(), (1, 0, false));
    assert!(!Arc::ptr_eq(&first, &scene.server.config()));
    let now = scene.server.config();
    look();
    assert_eq!(scene.seen(), (1, 0, false));
    assert!(Arc::ptr_eq(&now, &scene.server.config()));
    assert!(value(&scene.metrics, EXPIRY).unwrap() > 1_700_000_000);
}

#[test]
fn files_that_cannot_be_used_leave_what_is_in_force() {
    let Some(scene) = Scene::new(Some("ca")) else { return };
    let mut look = watcher(&scene.server);
    let first = scene.server.config();
    std::fs::write(scene.made.path("server.key"), "").unwrap();
    look();
    assert_eq!(scene.seen(), (0, 0, false));
    for _ in 0..3 {
        look();
        // Told once.
        assert_eq!(scene.seen(), (0, 1, true));
    }
    let told = scene.server.problem().unwrap();
    assert!(told.starts_with("TLS of the grpc listener: ") && told.contains("server.key holds no"), "{told}");
    std::fs::remove_file(scene.made.path("ca.crt")).unwrap();
    look();
    look();
    // Another problem.
    assert_eq!(scene.seen(), (0, 2, true));
    assert!(scene.server.problem().unwrap().contains("ca.crt cannot be read"));
    assert!(Arc::ptr_eq(&first, &scene.server.config()));
    scene.made.authority("ca");
    scene.replace("new.crt", "server.crt");
    scene.replace("new.key", "server.key");
    look();
    assert_eq!(scene.seen(), (1, 2, false));
    assert!(!Arc::ptr_eq(&first, &scene.server.config()));
    // The same problem, later, is told again.
    std::fs::write(scene.made.path("server.key"), "").unwrap();
    look();
    look();
    assert_eq!(scene.seen(), (1, 3, true));
    // What was in force is back: nothing to reload, and no problem any more.
    scene.replace("new.key", "server.key");
    look();
    assert_eq!(scene.seen(), (1, 3, false));
}

/// A mounted Secret: the files are links through a directory link, which is exchanged in one step.
#[test]
fn a_mounted_secret_is_followed() {
    let Some(made) = Made::new() else { return };
    made.certificate("new", "ca");
    for (directory, name) in [("..1", "server"), ("..2", "new")] {
        std::fs::create_dir(made.path(directory)).unwrap();
        for (end, file) in [("crt", "tls.crt"), ("key", "tls.key")] {
            copy(&made.path(&format!("{name}.{end}")), &made.path(directory).join(file));
        }
    }
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, made.path(name)).unwrap();
    link("..1", "..data");
    link("..data/tls.crt", "tls.crt");
    link("..data/tls.key", "tls.key");
    let metrics = metrics();
    let server = Server::load(Listener::Grpc, &made.files("tls", None), &metrics, Clock::system()).unwrap();
    let mut look = watcher(&server);
    look();
    assert_eq!(value(&metrics, DONE), Some(0));
    link("..2", "..data_tmp");
    std::fs::rename(made.path("..data_tmp"), made.path("..data")).unwrap();
    look();
    assert_eq!((value(&metrics, DONE), value(&metrics, FAILED)), (Some(1), Some(0)));
}

#[tokio::test(start_paused = true)]
async fn the_files_are_looked_at_until_the_end() {
    let Some(scene) = Scene::new(None) else { return };
    let (tasks, stop) = (tokio_util::task::TaskTracker::new(), tokio_util::sync::CancellationToken::new());
    let watching = tasks.spawn(watch(vec![Arc::clone(&scene.server)], LOOK_INTERVAL, tasks.clone(), stop.clone()));
    scene.replace("new.crt", "server.crt");
    scene.replace("new.key", "server.key");
    while scene.seen().0 == 0 {
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    assert_eq!(scene.seen(), (1, 0, false));
    stop.cancel();
    watching.await.unwrap();
    // Without TLS there is nothing to do.
    watch(Vec::new(), LOOK_INTERVAL, tasks, tokio_util::sync::CancellationToken::new()).await;
}
