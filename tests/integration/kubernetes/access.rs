//! What the gateway may not do, and how it says so.

use tandem::knobs::KubernetesKnobs;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::{Scene, pod, quick, routable};
use crate::harness::http::base;
use crate::harness::kube_api::KubeApi;
use crate::harness::pods::PodManifest;
use crate::harness::processor::closed_port;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually, within};

fn through(api: &KubeApi) -> TandemOptions {
    let args = vec!["--kubeconfig".to_owned(), api.kubeconfig().display().to_string()];
    TandemOptions { args, ..TandemOptions::default() }
}

async fn channel(tandem: &Tandem) -> tonic::transport::Channel {
    let endpoint = tonic::transport::Channel::from_shared(base(tandem.grpc())).expect("address");
    within("connect", endpoint.connect()).await.expect("connect")
}

async fn serving(tandem: &Tandem) -> i32 {
    let mut health = HealthClient::new(channel(tandem).await);
    let request = HealthCheckRequest { service: String::new() };
    health.check(request).await.expect("health").into_inner().status
}

/// The real process, without the right to list pods: it runs, says what it lacks, and is ready by itself once it has it.
#[tokio::test(flavor = "multi_thread")]
async fn r90_forbidden_to_list_pods_is_not_ready_until_it_is_granted() {
    let api = KubeApi::start().await;
    api.put("pods", PodManifest::new("a", "m", closed_port()).ready(true).manifest());
    api.refuse("list", "pods", None, 403);
    let tandem = Tandem::start(through(&api)).await;
    let refused = async || {
        let page = tandem.admin_json("/readyz").await;
        page["reasons"].to_string().contains("cannot list").then_some(page)
    };
    let page = eventually(SOON, "the reason", refused).await;
    assert_eq!(tandem.readiness().await, Some(503));
    let reasons: Vec<&str> = page["reasons"].as_array().expect("reasons").iter().filter_map(|r| r.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "no snapshot of the fleet yet",
            "cannot list pods (API group core) in all namespaces: the API server says 403 Forbidden: pods is forbidden: \
             User \"system:serviceaccount:aibrix-system:tandem\" cannot list resource \"pods\" in API group \"\" at the \
             cluster scope",
        ]
    );
    assert_eq!(serving(&tandem).await, 2, "Envoy's health checks see it too");
    api.allow_everything();
    tandem.wait_ready().await;
    eventually(SOON, "the health service", async || (serving(&tandem).await == 1).then_some(())).await;
    let page = tandem.admin_json("/readyz").await;
    assert_eq!((&page["routable_pods"], &page["reasons"]), (&1.into(), &serde_json::json!([])));
    // What is taken away later is a note: it serves on.
    api.refuse("list", "pods", None, 403);
    api.refuse("watch", "pods", None, 403);
    api.end_watches("pods", false);
    let noted = async || {
        let page = tandem.admin_json("/readyz").await;
        page["notes"].to_string().contains("pods (API group core) in all namespaces").then_some(page)
    };
    let page = eventually(SOON, "the note", noted).await;
    assert_eq!((tandem.readiness().await, &page["ready"]), (Some(200), &true.into()));
}

/// One namespace of several is forbidden: the one is named, and the fleet waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn r90_a_forbidden_namespace_is_named() {
    let api = KubeApi::start().await;
    for namespace in ["ns1", "ns2", "ns3"] {
        api.put("pods", pod("a", 1).namespace(namespace).uid(namespace).manifest());
    }
    api.refuse("list", "pods", Some("ns2"), 403);
    let knobs = KubernetesKnobs { namespaces: vec!["ns1".to_owned(), "ns2".to_owned()], ..KubernetesKnobs::default() };
    let scene = Scene::start(api, knobs, quick()).await;
    scene
        .says("the namespace", |reasons, _| {
            let begins = "cannot list pods (API group core) in namespace ns2: the API server says 403 Forbidden: ";
            matches!(reasons, [reason] if reason.starts_with(begins))
        })
        .await;
    assert!(!scene.builder.primed(), "half of the namespaces is half a list");
    scene.api.allow_everything();
    scene.shows("both", |fleet| routable(fleet) == ["ns1/a", "ns2/a"]).await;
    let asked = scene.api.asked();
    assert!(
        asked
            .iter()
            .filter(|asked| asked.plural != "httproutes")
            .all(|asked| { asked.namespace.as_deref().is_some_and(|namespace| ["ns1", "ns2"].contains(&namespace)) })
    );
}

/// Watching may be forbidden where listing is not: lists go on, at a distance.
#[tokio::test(flavor = "multi_thread")]
async fn r90_forbidden_to_watch_is_noted_and_lists_go_on() {
    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    api.refuse("watch", "pods", None, 403);
    let scene = Scene::start(api, KubernetesKnobs::default(), quick()).await;
    scene.shows("the list", |fleet| routable(fleet) == ["default/a"]).await;
    scene
        .says("the note", |reasons, notes| {
            let begins = "cannot watch pods (API group core) in all namespaces: the API server says 403 Forbidden: ";
            reasons.is_empty() && notes.iter().any(|note| note.starts_with(begins))
        })
        .await;
    scene.api.put("pods", pod("b", 2).manifest());
    scene.shows("the next list", |fleet| routable(fleet).len() == 2).await;
    scene.api.allow_everything();
    scene.says("nothing to note", |_, notes| notes.is_empty()).await;
}

/// Kinds that are not installed are fine, and looked for again; kinds that are forbidden are a note.
#[tokio::test(flavor = "multi_thread")]
async fn r90_kinds_that_are_absent_are_fine_and_forbidden_ones_are_noted() {
    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    api.installed("modeladapters", false);
    api.installed("httproutes", false);
    let scene = Scene::start(api, KubernetesKnobs::default(), quick()).await;
    scene.shows("the fleet", |fleet| routable(fleet) == ["default/a"]).await;
    let known = |scene: &Scene| scene.cluster.routes.available().map(|all| all.len());
    eventually(SOON, "no routes", async || (known(&scene) == Some(0)).then_some(())).await;
    assert!(scene.builder.fleet().routes().check("m").is_ok(), "where there are no routes, none is missed");
    assert_eq!(scene.cluster.words(), tandem::discovery::kubernetes::Words::default(), "nothing to say");
    scene.api.put("httproutes", &serde_json::json!({"metadata": {"namespace": "aibrix-system", "name": "r"}}));
    scene.api.installed("httproutes", true);
    eventually(SOON, "the route", async || (known(&scene) == Some(1)).then_some(())).await;

    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    api.refuse("list", "modeladapters", None, 403);
    let scene = Scene::start(api, KubernetesKnobs::default(), quick()).await;
    scene.shows("the fleet", |fleet| routable(fleet) == ["default/a"]).await;
    scene
        .says("the note", |reasons, notes| {
            let begins =
                "cannot list modeladapters (API group model.aibrix.ai) in all namespaces: the API server says 403";
            let ends = "; the gateway serves without them";
            reasons.is_empty() && matches!(notes, [note] if note.starts_with(begins) && note.ends_with(ends))
        })
        .await;
}

/// No connection, no TLS, no valid token: each is told, none tells the token, and all pass.
#[tokio::test(flavor = "multi_thread")]
async fn r90_what_keeps_the_api_server_away_is_told() {
    let address = |api: &KubeApi| api.address();
    for (server, token, expected) in [
        (None, "", "connect"),
        (Some("https"), "", "Ssl|TLS|tls|corrupt|InvalidMessage"),
        (Some("http"), "not-the-token", "the API server says 401 Unauthorized"),
    ] {
        let api = KubeApi::start().await;
        let server = server.map_or_else(|| base(closed_port()), |scheme| format!("{scheme}://{}", address(&api)));
        let kubeconfig = api.kubeconfig_for("other", &server, token);
        let scene = Scene::start_from(api, &kubeconfig, KubernetesKnobs::default(), quick()).await;
        scene.says(expected, |reasons, _| {
            let says = |reason: &String| expected.split('|').any(|word| reason.contains(word));
            matches!(reasons, [reason] if reason.starts_with("cannot list pods (API group core) in all namespaces: ") && says(reason))
        })
        .await;
        let words = format!("{:?}", scene.cluster.words());
        assert!(token.is_empty() || !words.contains(token), "{words}");
        println!("{words}");
        assert!(!scene.builder.primed());
    }
}

/// Credentials that expire while it serves: it serves on, and is back when they are.
#[tokio::test(flavor = "multi_thread")]
async fn r90_credentials_that_expire_leave_the_fleet_as_it_was() {
    let scene = Scene::with(&[pod("a", 1)], quick()).await;
    scene.api.lock_out(true);
    scene.api.end_watches("pods", false);
    scene
        .says("the note", |reasons, notes| {
            reasons.is_empty() && notes.iter().any(|note| note.contains("401 Unauthorized; serving on what was known"))
        })
        .await;
    scene.api.put("pods", pod("b", 2).manifest());
    assert_eq!(routable(&scene.fleet()), ["default/a"]);
    scene.api.lock_out(false);
    scene.shows("afterwards", |fleet| routable(fleet).len() == 2).await;
    scene.says("nothing to note", |_, notes| notes.is_empty()).await;
}
