//! Every manifest, as the API server itself reads it: a strict dry run of all that is rendered, charts included.

use std::collections::{BTreeMap, BTreeSet};

use http::Method;
use serde_json::{Value, json};

use super::api::RealApi;
use crate::deploy::{groups, yaml};

/// The patches for AIBrix's objects, as those objects with nothing else but what they hang on.
fn patched() -> Vec<Value> {
    let gateway = json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "aibrix-eg"});
    let route = json!({"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "aibrix-reserved-router"});
    let (envoy, core) = ("gateway.envoyproxy.io/v1alpha1", "gateway.networking.k8s.io/v1");
    // In AIBrix's form: the one target of its policy has a field of its own.
    [
        ("route", core, "HTTPRoute", json!({"parentRefs": [gateway]})),
        ("extension-policy", envoy, "EnvoyExtensionPolicy", json!({"targetRef": route})),
        ("extension-policy-1.4", envoy, "EnvoyExtensionPolicy", json!({"targetRef": route})),
        ("patch-policy", envoy, "EnvoyPatchPolicy", json!({"type": "JSONPatch", "targetRef": gateway})),
        ("client-traffic-policy", envoy, "ClientTrafficPolicy", json!({"targetRefs": [gateway]})),
    ]
    .into_iter()
    .map(|(file, version, kind, mut spec)| {
        let patch = yaml(&format!("deploy/kubernetes/overlays/aibrix/envoy/{file}.yaml"));
        let fields = patch["spec"].as_object().expect("a spec").clone();
        spec.as_object_mut().expect("a spec").extend(fields);
        json!({"apiVersion": version, "kind": kind, "metadata": {"name": file}, "spec": spec})
    })
    .collect()
}

/// Which kinds a group and version have, and where; empty where the server does not know it.
async fn kinds(api: &RealApi, version: &str) -> BTreeMap<String, (String, bool)> {
    let path = if version.contains('/') { format!("/apis/{version}") } else { format!("/api/{version}") };
    let (status, answer) = api.ask(Method::GET, &path, &Value::Null).await;
    assert!(matches!(status, 200 | 404), "{path}: {status}");
    let resources = answer["resources"].as_array().cloned().unwrap_or_default();
    let whole = resources.iter().filter_map(|resource| {
        let name = resource["name"].as_str().filter(|name| !name.contains('/'))?;
        Some((resource["kind"].as_str()?.to_owned(), (format!("{path}/@{name}"), resource["namespaced"] == true)))
    });
    whole.collect()
}

/// What the schema of the server's EnvoyExtensionPolicy knows of the newest field that the manifests use.
async fn knows_panic_threshold(api: &RealApi) -> bool {
    let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/envoyextensionpolicies.gateway.envoyproxy.io";
    let (_, answer) = api.ask(Method::GET, path, &Value::Null).await;
    answer.to_string().contains("\"panicThreshold\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_manifest_passes_a_strict_dry_run() {
    let Some(api) = RealApi::start("dry-run").await else { return };
    let rendered =
        groups().flat_map(|(group, objects)| objects.iter().map(move |found| (group.clone(), found.clone())));
    let mut objects: Vec<(String, Value)> = rendered.collect();
    objects.extend(patched().into_iter().map(|found| ("the patches for AIBrix".to_owned(), found)));
    let newest = knows_panic_threshold(&api).await;
    let (mut known, mut absent, mut seen, mut passed) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new(), 0);
    let mut problems = Vec::new();
    for (group, mut object) in objects {
        let (version, kind) = (object["apiVersion"].to_string(), object["kind"].to_string());
        let (version, kind) = (version.trim_matches('"').to_owned(), kind.trim_matches('"').to_owned());
        if !known.contains_key(&version) {
            known.insert(version.clone(), kinds(&api, &version).await);
        }
        let Some((path, namespaced)) = known[&version].get(&kind) else {
            absent.insert(format!("{version}/{kind}"));
            continue;
        };
        let namespaces = if *namespaced { format!("namespaces/{}/", api.namespace) } else { String::new() };
        if *namespaced {
            object["metadata"]["namespace"] = (*api.namespace).into();
        }
        // What is there already may have the name.
        let name = format!("{}-{}", object["metadata"]["name"].as_str().expect("a name"), std::process::id());
        object["metadata"]["name"] = name.clone().into();
        if !seen.insert(object.to_string()) {
            continue;
        }
        let path = path.replace('@', &namespaces) + "?dryRun=All&fieldValidation=Strict";
        let (status, answer) = api.ask(Method::POST, &path, &object).await;
        let too_new = object.to_string().contains("panicThreshold") && !newest;
        match status {
            201 if !too_new => passed += 1,
            400 if too_new && answer["message"].to_string().contains("panicThreshold") => passed += 1,
            _ => problems.push(format!("{group}: {kind} {name}: {status} {}", answer["message"])),
        }
    }
    println!("{passed} objects passed; not served here: {absent:?}; panicThreshold is known: {newest}");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(passed > 40, "{passed}");
    assert!(
        absent
            .iter()
            .all(|kind| kind.contains(".k8s.io/") || kind.contains("envoyproxy") || kind.contains("monitoring"))
    );
    // Of the two versions of this policy one is served wherever the Gateway API has it at all.
    let both = ["v1", "v1alpha3"]
        .map(|version| absent.contains(&format!("gateway.networking.k8s.io/{version}/BackendTLSPolicy")));
    let gateway_api = !known.get("gateway.networking.k8s.io/v1").is_none_or(BTreeMap::is_empty);
    println!("gateway api: {gateway_api}; BackendTLSPolicy v1 and v1alpha3 are absent: {both:?}");
    api.close(&[]).await;
}
