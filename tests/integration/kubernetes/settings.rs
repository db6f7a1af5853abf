//! The settings and the command line, by what the process asks the API server.

use std::time::Duration;

use crate::harness::kube_api::{Asked, KubeApi, Mood};
use crate::harness::pods::PodManifest;
use crate::harness::processor::closed_port;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually};

async fn start(api: &KubeApi, env: &[(&str, &str)], args: &[&str]) -> Tandem {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let args = args.iter().map(|argument| (*argument).to_owned()).collect();
    let tandem = Tandem::start(TandemOptions { env, args, ..TandemOptions::default() }).await;
    tandem.wait_ready().await;
    eventually(SOON, "a watch", async || (api.count("watch", "pods") > 0).then_some(())).await;
    tandem
}

fn pods_asked(api: &KubeApi) -> Vec<Asked> {
    api.asked().into_iter().filter(|asked| asked.plural == "pods").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_and_selector_are_what_is_asked_for() {
    for (env, namespaces, selector) in [
        (&[][..], vec![None], None),
        (
            &[
                ("TANDEM_KUBERNETES_NAMESPACES", "ns1, ns2,ns1"),
                ("TANDEM_KUBERNETES_POD_SELECTOR", "model.aibrix.ai/name,zone in (a,b)"),
            ][..],
            vec![Some("ns1"), Some("ns2")],
            Some("model.aibrix.ai/name,zone in (a,b)"),
        ),
    ] {
        let api = KubeApi::start().await;
        let kubeconfig = api.kubeconfig().display().to_string();
        let _tandem = start(&api, env, &["--kubeconfig", &kubeconfig]).await;
        let mut asked: Vec<_> = pods_asked(&api).into_iter().map(|asked| asked.namespace).collect();
        asked.sort();
        asked.dedup();
        assert_eq!(asked, namespaces.iter().map(|name| name.map(str::to_owned)).collect::<Vec<_>>());
        for asked in pods_asked(&api) {
            assert_eq!(asked.agent, concat!("tandem/", env!("CARGO_PKG_VERSION")));
            assert_eq!(asked.query.get("labelSelector").map(String::as_str), selector);
            if asked.verb == "list" {
                assert_eq!(asked.query["limit"], "500");
            } else {
                assert_eq!(asked.query["allowWatchBookmarks"], "true");
                let seconds: u32 = asked.query["timeoutSeconds"].parse().expect("seconds");
                // Over before it would pass for silent, which is after two minutes.
                assert!((72..=90).contains(&seconds), "{seconds}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_and_age_of_the_list_are_bounded_by_their_settings() {
    for (variable, mood) in
        [("TANDEM_KUBERNETES_STALL_SECONDS", Mood::Stalled), ("TANDEM_KUBERNETES_RELIST_SECONDS", Mood::Well)]
    {
        let api = KubeApi::start().await;
        api.put("pods", PodManifest::new("a", "m", closed_port()).ready(true).manifest());
        let kubeconfig = api.kubeconfig().display().to_string();
        let _tandem = start(&api, &[(variable, "1")], &["--kubeconfig", &kubeconfig]).await;
        api.mood("pods", mood);
        eventually(SOON, variable, async || (api.count("list", "pods") >= 3).then_some(())).await;
    }
    // By default neither happens so soon.
    let api = KubeApi::start().await;
    let kubeconfig = api.kubeconfig().display().to_string();
    let _tandem = start(&api, &[], &["--kubeconfig", &kubeconfig]).await;
    api.mood("pods", Mood::Stalled);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(api.count("list", "pods"), 1);
}

/// Without any flag, the surroundings say where the cluster is.
#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_is_found_in_the_surroundings() {
    let api = KubeApi::start().await;
    api.put("pods", PodManifest::new("a", "m", closed_port()).ready(true).manifest());
    let kubeconfig = api.kubeconfig().display().to_string();
    let tandem = start(&api, &[("KUBECONFIG", &kubeconfig)], &[]).await;
    assert_eq!(tandem.admin_json("/readyz").await["routable_pods"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_cluster_it_says_what_could_be_done() {
    let nowhere = tempfile::tempdir().expect("a directory");
    let gone = nowhere.path().join("no-such-file").display().to_string();
    let env = vec![("HOME".to_owned(), nowhere.path().display().to_string())];
    for (args, env, expected) in [
        (vec![], env, "say where the pods are: --pods FILE-or-DIR"),
        (vec!["--kubeconfig".to_owned(), gone], vec![], "the kubeconfig cannot be used"),
        (
            vec!["--kubeconfig".to_owned(), "x".to_owned(), "--pods".to_owned(), "y".to_owned()],
            vec![],
            "cannot be used with",
        ),
    ] {
        let failure = Tandem::try_start(TandemOptions { env, args, ..TandemOptions::default() }).await.unwrap_err();
        assert!(failure.contains(expected), "{failure}");
    }
}
