//! Beside AIBrix's gateway plugin: nothing is shared with it, and the patches that put Tandem in its place say what the objects
//! of an installation without AIBrix say.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{AIBRIX, list, object, rendered, word, yaml};

/// What AIBrix 0.7 has in its namespace and calls by these names, in either of its installations. Read in its manifests.
const THEIRS: [(&str, &str); 20] = [
    ("Deployment", "aibrix-gateway-plugins"),
    ("Service", "aibrix-gateway-plugins"),
    ("ServiceAccount", "aibrix-gateway-plugins"),
    ("ServiceAccount", "aibrix-gateway-plugin"),
    ("ClusterRole", "aibrix-gateway-plugins-role"),
    ("ClusterRole", "aibrix-gateway-plugins"),
    ("ClusterRoleBinding", "aibrix-gateway-plugins-rolebinding"),
    ("ClusterRoleBinding", "aibrix-gateway-plugins"),
    ("PodDisruptionBudget", "aibrix-gateway-plugins-pdb"),
    ("PodDisruptionBudget", "gateway-plugins-pdb"),
    ("Deployment", "aibrix-redis-master"),
    ("Service", "aibrix-redis-master"),
    ("HTTPRoute", "aibrix-reserved-router"),
    ("HTTPRoute", "aibrix-reserved-router-metadata-endpoint"),
    ("EnvoyExtensionPolicy", "aibrix-gateway-plugins-extension-policy"),
    ("EnvoyPatchPolicy", "aibrix-epp"),
    ("ClientTrafficPolicy", "aibrix-client-connection-buffersize"),
    ("BackendTrafficPolicy", "aibrix-backend-connection-policy"),
    ("EnvoyProxy", "aibrix-custom-proxy-config"),
    ("ServiceMonitor", "gateway-plugin-metrics-monitor"),
];

/// Labels of the plugin's pods, by its kustomization and by its chart; its services, budgets and monitors select some of them.
const THEIR_LABELS: [(&str, &str); 4] = [
    ("app", "gateway-plugins"),
    ("app.kubernetes.io/name", "aibrix"),
    ("app.kubernetes.io/instance", "aibrix"),
    ("app.kubernetes.io/component", "aibrix-gateway-plugin"),
];

fn overlay() -> &'static [Value] {
    &rendered().kustomize[AIBRIX]
}

#[test]
fn no_object_is_shared_with_aibrix() {
    for found in overlay() {
        let name = (word(&found["kind"]), word(&found["metadata"]["name"]));
        assert!(!THEIRS.contains(&name), "{name:?} is AIBrix's");
        assert!(name.1.starts_with("tandem"), "{name:?}");
    }
}

/// A selector of either side finds no pod of the other: no service with both behind it, no pod with two budgets, no
/// ReplicaSet that is adopted, nothing scraped twice.
#[test]
fn no_selector_finds_pods_of_both() {
    let theirs = |labels: &Value| THEIR_LABELS.iter().any(|(key, value)| labels[key] == *value);
    let deployment = object(overlay(), "Deployment", "tandem-gateway");
    assert!(!theirs(&deployment["spec"]["template"]["metadata"]["labels"]));
    let selectors = ["/spec/selector/matchLabels", "/spec/selector", "/spec/podSelector/matchLabels"];
    let mut seen = 0;
    for found in overlay() {
        assert!(!theirs(&found["metadata"]["labels"]), "what selects services, as theirs do, finds it: {found}");
        for selector in selectors.iter().filter_map(|at| found.pointer(at)).filter(|found| found["app"].is_string()) {
            assert_eq!(selector, &json!({"app": "tandem-gateway"}), "{found}");
            seen += 1;
        }
    }
    assert!(seen >= 6, "Deployment, two services, budget, policy, monitor: {seen}");
}

fn patch(name: &str) -> Value {
    let patch = yaml(&format!("{AIBRIX}/envoy/{name}.yaml"));
    assert_eq!(patch.as_object().expect("an object").keys().collect::<Vec<_>>(), ["spec"], "{name}");
    patch["spec"].clone()
}

/// What the patch leaves alone is what it hangs on: AIBrix's own names for it stay, in whichever form they are.
fn without(name: &str, left_alone: &[&str]) -> Value {
    let mut spec = yaml(&format!("deploy/kubernetes/envoy-gateway/{name}.yaml"))["spec"].clone();
    for field in left_alone {
        assert!(spec.as_object_mut().expect("a spec").remove(*field).is_some(), "{name}: {field}");
    }
    spec
}

#[test]
fn the_patches_say_what_an_installation_without_aibrix_says() {
    assert_eq!(patch("route"), without("route", &["parentRefs"]));
    assert_eq!(patch("patch-policy"), without("patch-policy", &["type", "targetRef"]));
    assert_eq!(patch("extension-policy-1.4"), without("extension-policy", &["targetRefs"]));
    let mut client = without("client-traffic-policy", &["targetRefs"]);
    // AIBrix's own patch, by which it goes back, goes by a position that this would change.
    assert!(client["connection"].as_object_mut().expect("a connection").remove("connectionLimit").is_some());
    assert_eq!(patch("client-traffic-policy"), client);
    let services =
        [&patch("route")["rules"][0]["backendRefs"], &patch("extension-policy")["extProc"][0]["backendRefs"]];
    for refs in services {
        let [service] = list(refs) else { panic!("one service: {refs}") };
        object(overlay(), "Service", word(&service["name"]));
    }
}

/// The fields of these objects that not every version of Envoy Gateway since 1.2 has, and the first that has them. Compared
/// with the definitions of 1.2.8, 1.3.0, 1.4.0, 1.5.0, 1.6.0 and 1.9.0.
const SINCE: [(&str, &str); 3] = [
    ("/extProc/0/processingMode/allowModeOverride", "1.3.0"),
    ("/extProc/0/processingMode/response/attributes", "1.3.0"),
    ("/extProc/0/backendSettings/healthCheck/panicThreshold", "1.4.0"),
];

#[test]
fn each_version_of_envoy_gateway_gets_what_it_knows() {
    let (older, newer) = (patch("extension-policy"), patch("extension-policy-1.4"));
    let mut reduced = newer.clone();
    for (field, _) in SINCE {
        assert!(newer.pointer(field).is_some() && older.pointer(field).is_none(), "{field}");
        let (parent, last) = field.rsplit_once('/').expect("a field");
        reduced.pointer_mut(parent).and_then(Value::as_object_mut).expect(parent).remove(last);
    }
    assert_eq!(older, reduced);
    // Where a version is named, it is that of the newest field.
    let newest = SINCE.iter().map(|(_, version)| *version).max().and_then(|version| version.strip_suffix(".0"));
    let claim = format!("Envoy Gateway {} or newer", newest.expect("a version"));
    for file in
        ["deploy/README.md", "deploy/kubernetes/envoy-gateway/kustomization.yaml", "deploy/helm/tandem/values.yaml"]
    {
        let text = super::text(file);
        assert!(text.contains(&claim), "{file}: {claim}");
        assert!(!text.contains("1.3 or newer"), "{file}");
    }
}

/// `v1` is served since Gateway API 1.4, `v1alpha3` up to 1.3; both are there, and say the same.
#[test]
fn the_policy_for_tls_is_there_for_older_versions_too() {
    let folder = "deploy/kubernetes/overlays/tls";
    let (new, mut old) = (
        yaml(&format!("{folder}/backend-tls-policy.yaml")),
        yaml(&format!("{folder}/backend-tls-policy-v1alpha3.yaml")),
    );
    assert_eq!(new["apiVersion"], "gateway.networking.k8s.io/v1");
    assert_eq!(old["apiVersion"], "gateway.networking.k8s.io/v1alpha3");
    old["apiVersion"] = new["apiVersion"].clone();
    assert_eq!(old, new);
    let version =
        |case: &str| object(&rendered().helm[case], "BackendTLSPolicy", "tandem-gateway")["apiVersion"].clone();
    assert_eq!(
        (version("tls"), version("old tls")),
        (new["apiVersion"].clone(), json!("gateway.networking.k8s.io/v1alpha3"))
    );
}

/// A pod that names its model by an annotation, or is in the pool of a claim, can be reached: no selector may stand in the way.
#[test]
fn the_network_policies_let_replicas_and_envoys_reach_every_engine() {
    let anywhere = json!({"to": [{"namespaceSelector": {}}]});
    let mut seen = BTreeSet::new();
    for (group, objects) in super::groups() {
        for policy in super::of_kind(objects, "NetworkPolicy") {
            let egress = list(&policy["spec"]["egress"]);
            let name = word(&policy["metadata"]["name"]);
            // Redis talks to nobody.
            if egress.is_empty() {
                continue;
            }
            let open = egress.contains(&anywhere);
            assert_eq!(open, group != "helm, bare", "{group}: {name}");
            seen.insert(name);
        }
    }
    assert!(seen.contains("tandem-gateway") && seen.contains("tandem-envoy"), "{seen:?}");
    let narrowed = object(&rendered().helm["bare"], "NetworkPolicy", "tandem-gateway");
    let selector = &narrowed["spec"]["egress"][0]["to"][0]["podSelector"]["matchExpressions"][0]["key"];
    assert_eq!(selector, "model.aibrix.ai/name");
}
