//! Every manifest is valid, and what holds for all of them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{AIBRIX, ALL, BARE, TLS, groups, list, object, of_kind, rendered, word};

#[test]
fn all_manifests_parse_and_pass_schema_validation() {
    let rendered = rendered();
    assert!(rendered.problems.is_empty(), "{}", rendered.problems.join("\n"));
    // What no Kubernetes release has a schema for: the tests of this folder look at each of these themselves.
    let custom = BTreeSet::from(
        [
            "gateway.envoyproxy.io/v1alpha1/BackendTrafficPolicy",
            "gateway.envoyproxy.io/v1alpha1/ClientTrafficPolicy",
            "gateway.envoyproxy.io/v1alpha1/EnvoyExtensionPolicy",
            "gateway.envoyproxy.io/v1alpha1/EnvoyPatchPolicy",
            "gateway.envoyproxy.io/v1alpha1/EnvoyProxy",
            "gateway.networking.k8s.io/v1/Gateway",
            "gateway.networking.k8s.io/v1/GatewayClass",
            "gateway.networking.k8s.io/v1/HTTPRoute",
            "gateway.networking.k8s.io/v1/BackendTLSPolicy",
            "gateway.networking.k8s.io/v1alpha3/BackendTLSPolicy",
            "monitoring.coreos.com/v1/ServiceMonitor",
        ]
        .map(str::to_owned),
    );
    assert_eq!(rendered.without_schema, custom);
    for group in [ALL, AIBRIX, BARE, TLS] {
        assert!(rendered.kustomize[group].len() >= 10, "{group}");
    }
    // The namespace of everything that has one: an object in `default` would be found by nobody.
    for (group, objects) in groups() {
        for object in objects {
            let cluster_wide = ["ClusterRole", "ClusterRoleBinding", "GatewayClass"].contains(&word(&object["kind"]));
            let namespace = object["metadata"]["namespace"].as_str();
            assert_eq!(namespace, (!cluster_wide).then_some("aibrix-system"), "{group}: {object}");
            assert_eq!(
                object["metadata"]["labels"]["app.kubernetes.io/part-of"].as_str().is_none(),
                word(&object["metadata"]["name"]).starts_with("tandem-envoy-"),
                "all but the generated ConfigMap can be found by one label: {group}: {object}"
            );
        }
    }
}

/// Without what Helm adds, and with lists of variables in one order.
fn plain(objects: &[Value]) -> BTreeMap<(String, String), Value> {
    let mut plain = BTreeMap::new();
    for object in objects {
        let mut object = object.clone();
        let labels = object["metadata"]["labels"].as_object_mut().expect("labels");
        for added in ["helm.sh/chart", "app.kubernetes.io/managed-by"] {
            labels.remove(added);
        }
        // Comments of the file are no difference.
        if object["kind"] == "ConfigMap" {
            let lines = word(&object["data"]["redis.conf"]).lines().filter(|line| !line.starts_with('#'));
            let kept: Vec<&str> = lines.collect();
            object["data"]["redis.conf"] = kept.join("\n").into();
        }
        let key = (word(&object["kind"]).to_owned(), word(&object["metadata"]["name"]).to_owned());
        assert_eq!(plain.insert(key, object), None);
    }
    plain
}

#[test]
fn the_chart_and_the_kustomizations_say_the_same() {
    let rendered = rendered();
    for (chart, kustomization) in [("as kustomize", ALL), ("aibrix", AIBRIX), ("tls", TLS)] {
        let (mut chart, mut kustomization) = (plain(&rendered.helm[chart]), plain(&rendered.kustomize[kustomization]));
        // Somebody else's Redis: one opens the port to the namespace, the other to everywhere.
        let policy = ("NetworkPolicy".to_owned(), "tandem-gateway".to_owned());
        for objects in [&mut chart, &mut kustomization] {
            let redis = &mut objects.get_mut(&policy).expect("a policy")["spec"]["egress"][2];
            assert_eq!(redis["ports"], json!([{"protocol": "TCP", "port": 6379}]));
            if kustomization_is_without_redis(redis) {
                *redis = Value::Null;
            }
        }
        assert_eq!(chart.keys().collect::<Vec<_>>(), kustomization.keys().collect::<Vec<_>>());
        for (key, object) in &chart {
            assert_eq!(object, &kustomization[key], "{key:?}");
        }
    }
}

fn kustomization_is_without_redis(rule: &Value) -> bool {
    rule["to"][0]["podSelector"] != json!({"matchLabels": {"app": "redis"}})
}

#[test]
fn the_roles_allow_what_is_watched_and_nothing_else() {
    let watched = [("", "pods"), ("model.aibrix.ai", "modeladapters"), ("gateway.networking.k8s.io", "httproutes")];
    let expected: Vec<Value> = watched
        .iter()
        .map(|(group, kind)| json!({"apiGroups": [group], "resources": [kind], "verbs": ["list", "watch"]}))
        .collect();
    let mut seen = 0;
    for (group, objects) in groups() {
        assert!(of_kind(objects, "Role").is_empty() && of_kind(objects, "RoleBinding").is_empty(), "{group}");
        let (roles, bindings) = (of_kind(objects, "ClusterRole"), of_kind(objects, "ClusterRoleBinding"));
        assert_eq!(roles.len(), bindings.len(), "{group}");
        for (role, binding) in roles.iter().zip(&bindings) {
            assert_eq!(role["rules"], Value::from(expected.clone()), "{group}");
            assert!(role["aggregationRule"].is_null());
            assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"], "{group}");
            let [subject] = list(&binding["subjects"]) else { panic!("{group}: {binding}") };
            object(objects, "ServiceAccount", word(&subject["name"]));
            assert_eq!(subject["namespace"], "aibrix-system");
            seen += 1;
        }
    }
    assert!(seen >= 8);
}

#[test]
fn every_container_runs_with_as_little_as_possible() {
    for (group, objects) in groups() {
        for workload in objects.iter().filter(|object| object["spec"]["template"]["spec"]["containers"].is_array()) {
            let pod = &workload["spec"]["template"]["spec"];
            let name = format!("{group}: {}", workload["metadata"]["name"]);
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{name}");
            assert!(pod["securityContext"]["runAsUser"].as_u64().is_some_and(|user| user > 0), "{name}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            for forbidden in ["hostNetwork", "hostPID", "hostIPC"] {
                assert!(pod[forbidden].is_null(), "{name}");
            }
            // Only Tandem asks the API server.
            let asks = pod["serviceAccountName"].is_string();
            assert_eq!(pod["automountServiceAccountToken"] == false, !asks, "{name}");
            for container in list(&pod["containers"]) {
                let context = &container["securityContext"];
                assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
                assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
                assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}), "{name}");
                let image = word(&container["image"]);
                let tag = image.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
                assert!(tag.is_some_and(|tag| !tag.is_empty() && tag != "latest"), "{name}: {image}");
                assert!(container["resources"]["requests"]["cpu"].is_string(), "{name}");
                assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
                for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
                    assert!(container[probe].is_object(), "{name}: {probe}");
                }
            }
        }
        // A password in a manifest is everybody's password.
        for secret in of_kind(objects, "Secret") {
            assert!(group.starts_with("helm"), "{group}: {secret}");
            assert!(word(&secret["data"]["redis-password"]).len() >= 40, "{group}: made at random");
        }
    }
    let made = |case: &str| {
        let secrets = of_kind(&rendered().helm[case], "Secret");
        secrets.iter().map(|secret| secret["data"]["redis-password"].clone()).collect::<Vec<_>>()
    };
    assert_ne!(made("default"), made("numbered"), "each installation has its own");
    assert!(made("as kustomize").is_empty(), "a Secret that exists is not made again");
}

/// The labels of a selector are among those of the pod's template.
fn selects(selector: &Value, workload: &Value) -> bool {
    let labels = &workload["spec"]["template"]["metadata"]["labels"];
    selector.as_object().is_some_and(|wanted| wanted.iter().all(|(key, value)| labels[key] == *value))
}

#[test]
fn services_policies_and_budgets_find_their_pods_and_ports() {
    for (group, objects) in groups() {
        let workloads: Vec<&Value> =
            ["Deployment", "StatefulSet"].iter().flat_map(|kind| of_kind(objects, kind)).collect();
        if workloads.is_empty() {
            continue;
        }
        for workload in &workloads {
            assert!(selects(&workload["spec"]["selector"]["matchLabels"], workload), "{group}");
        }
        for service in of_kind(objects, "Service") {
            let name = &service["metadata"]["name"];
            let behind: Vec<_> =
                workloads.iter().filter(|workload| selects(&service["spec"]["selector"], workload)).collect();
            let [workload] = behind[..] else { panic!("{group}: {name} selects {} workloads", behind.len()) };
            let container = &workload["spec"]["template"]["spec"]["containers"][0];
            for port in list(&service["spec"]["ports"]) {
                let names = list(&container["ports"]).iter().any(|offered| offered["name"] == port["targetPort"]);
                assert!(names, "{group}: {name} {port}");
            }
        }
        for (kind, selector) in [("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")] {
            for found in of_kind(objects, kind) {
                let selector = &found["spec"][selector]["matchLabels"];
                let count = workloads.iter().filter(|workload| selects(selector, workload)).count();
                assert_eq!(count, 1, "{group}: {kind} {}", found["metadata"]["name"]);
            }
        }
        for monitor in of_kind(objects, "ServiceMonitor") {
            let wanted = monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels");
            let services = of_kind(objects, "Service");
            let found: Vec<_> = services
                .iter()
                .filter(|service| wanted.iter().all(|(key, value)| service["metadata"]["labels"][key] == *value))
                .collect();
            let [service] = found[..] else { panic!("{group}: each pod is scraped once, not {}", found.len()) };
            let endpoint = &monitor["spec"]["endpoints"][0];
            assert_eq!(endpoint["honorLabels"], true, "{group}: rules and dashboards go by our labels");
            let port = &endpoint["port"];
            assert!(list(&service["spec"]["ports"]).iter().any(|offered| offered["name"] == *port), "{group}");
        }
    }
}

#[test]
fn redis_keeps_nothing_and_drops_nothing() {
    for group in [&rendered().kustomize[ALL], &rendered().kustomize[BARE], &rendered().helm["default"]] {
        let config = word(&object(group, "ConfigMap", "aibrix-redis")["data"]["redis.conf"]);
        for line in ["save \"\"", "appendonly no", "maxmemory-policy noeviction", "protected-mode yes"] {
            assert!(config.lines().any(|found| found == line), "{line}: {config}");
        }
        let deployment = object(group, "Deployment", "aibrix-redis-master");
        assert_eq!(
            (&deployment["spec"]["replicas"], &deployment["spec"]["strategy"]["type"]),
            (&1.into(), &"Recreate".into())
        );
        let container = &deployment["spec"]["template"]["spec"]["containers"][0];
        let memory =
            config.lines().find_map(|line| line.strip_prefix("maxmemory ")?.strip_suffix("mb")?.parse::<u64>().ok());
        let memory = memory.expect("maxmemory") << 20;
        assert!(super::bytes(&container["resources"]["limits"]["memory"]) >= memory + memory / 4);
    }
}
