{{- /* The strategic merge of kustomize: `from` is merged into `to`, both maps. Maps are merged by key, lists of things
       that have an identity by that, other lists as a whole; null removes. */ -}}
{{- define "headrace.merge" -}}
{{- $to := .to -}}
{{- range $key, $value := .from -}}
  {{- $old := get $to $key -}}
  {{- $id := get (dict "containers" "name" "initContainers" "name" "env" "name" "volumes" "name" "volumeMounts" "mountPath" "topologySpreadConstraints" "topologyKey" "imagePullSecrets" "name") $key -}}
  {{- if and (eq $key "ports") (kindIs "slice" $value) -}}
    {{- if hasKey (first $value) "containerPort" -}}{{- $id = "containerPort" -}}{{- end -}}
  {{- end -}}
  {{- if kindIs "invalid" $value -}}
    {{- $_ := unset $to $key -}}
  {{- else if and (kindIs "map" $value) (kindIs "map" $old) -}}
    {{- include "headrace.merge" (dict "to" $old "from" $value) -}}
  {{- else if and $id (kindIs "slice" $value) (kindIs "slice" $old) -}}
    {{- range $item := $value -}}
      {{- $found := false -}}
      {{- range $old -}}
        {{- if eq (toString (get . $id)) (toString (get $item $id)) -}}
          {{- include "headrace.merge" (dict "to" . "from" $item) -}}
          {{- $found = true -}}
        {{- end -}}
      {{- end -}}
      {{- if not $found -}}{{- $old = append $old $item -}}{{- end -}}
    {{- end -}}
    {{- $_ := set $to $key $old -}}
  {{- else -}}
    {{- $_ := set $to $key $value -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The documents of a file of the manifests, put into the list of `into`. */ -}}
{{- define "headrace.documents" -}}
{{- $into := .into -}}
{{- $text := .root.Files.Get .path -}}
{{- if not $text -}}{{- fail (printf "the chart lacks %s" .path) -}}{{- end -}}
{{- range splitList "\n---\n" (printf "\n%s" $text) -}}
  {{- $document := fromYaml . -}}
  {{- if hasKey $document "Error" -}}{{- fail (get $document "Error") -}}{{- end -}}
  {{- if $document -}}{{- $_ := set $into "list" (append $into.list $document) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What a kustomization of the manifests adds to `objects`, a map of "KIND NAME": its resources, then its patches. */ -}}
{{- define "headrace.kustomization" -}}
{{- $root := .root -}}
{{- $objects := .objects -}}
{{- $directory := printf "manifests/%s" .directory -}}
{{- $kustomization := fromYaml ($root.Files.Get (printf "%s/kustomization.yaml" $directory)) -}}
{{- range $kustomization.resources -}}
  {{- $found := dict "list" list -}}
  {{- include "headrace.documents" (dict "root" $root "path" (printf "%s/%s" $directory .) "into" $found) -}}
  {{- range $found.list -}}
    {{- $_ := set $objects (printf "%s %s" .kind .metadata.name) . -}}
  {{- end -}}
{{- end -}}
{{- range $kustomization.patches -}}
  {{- $found := dict "list" list -}}
  {{- include "headrace.documents" (dict "root" $root "path" (printf "%s/%s" $directory .path) "into" $found) -}}
  {{- range $found.list -}}
    {{- $key := printf "%s %s" .kind .metadata.name -}}
    {{- if not (hasKey $objects $key) -}}
      {{- fail (printf "components: %s changes the %s, so put the component that makes it before" (base $directory) $key) -}}
    {{- end -}}
    {{- include "headrace.merge" (dict "to" (get $objects $key) "from" .) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The values of a role, put into its workload. */ -}}
{{- define "headrace.role" -}}
{{- $workload := .workload -}}
{{- $values := .values -}}
{{- $pod := $workload.spec.template.spec -}}
{{- if hasKey $workload.spec "replicas" -}}{{- $_ := set $workload.spec "replicas" (int $values.replicas) -}}{{- end -}}
{{- range $field := list "nodeSelector" "tolerations" -}}
  {{- with get $values $field -}}{{- $_ := set $pod $field . -}}{{- end -}}
{{- end -}}
{{- with $values.podAnnotations -}}
  {{- include "headrace.merge" (dict "to" $workload.spec.template.metadata "from" (dict "annotations" .)) -}}
{{- end -}}
{{- $main := first $pod.containers -}}
{{- range $container := append (default list $pod.initContainers) $main -}}
  {{- if $values.resources -}}{{- $_ := set $container "resources" $values.resources -}}{{- end -}}
{{- end -}}
{{- $given := default list $values.args -}}
{{- $drain := dict -}}
{{- range concat $main.args $given -}}
  {{- if hasPrefix "--drain-timeout=" . -}}
    {{- $seconds := trimPrefix "--drain-timeout=" . | float64 -}}
    {{- $_ := set $drain "given" $seconds -}}
    {{- $_ := set $drain "was" (default $seconds $drain.was) -}}
  {{- end -}}
{{- end -}}
{{- if gt (default 0.0 $drain.given) (default 0.0 $drain.was) -}}
  {{- /* The pod has as much longer to end. */ -}}
  {{- $_ := set $pod "terminationGracePeriodSeconds" (add $pod.terminationGracePeriodSeconds (ceil (subf $drain.given $drain.was))) -}}
{{- end -}}
{{- $args := list -}}
{{- range $arg := $main.args -}}
  {{- $name := first (splitList "=" $arg) -}}
  {{- $kept := true -}}
  {{- range $given -}}{{- if eq $name (first (splitList "=" .)) -}}{{- $kept = false -}}{{- end -}}{{- end -}}
  {{- if $kept -}}{{- $args = append $args $arg -}}{{- end -}}
{{- end -}}
{{- $_ := set $main "args" (concat $args $given) -}}
{{- $env := list -}}
{{- range $name, $value := $values.env -}}{{- $env = append $env (dict "name" $name "value" (toString $value)) -}}{{- end -}}
{{- include "headrace.merge" (dict "to" $main "from" (dict "env" $env)) -}}
{{- range $claim := $workload.spec.volumeClaimTemplates -}}
  {{- with $values.storage -}}
    {{- with .size -}}{{- $_ := set $claim.spec.resources.requests "storage" . -}}{{- end -}}
    {{- with .className -}}{{- $_ := set $claim.spec "storageClassName" . -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- include "headrace.merge" (dict "to" $workload "from" (default dict $values.patch)) -}}
{{- end -}}

{{- /* A workload for a model of its own: it has another name, and its pods a label with the model. */ -}}
{{- define "headrace.model" -}}
{{- $workload := .workload -}}
{{- $config := .config -}}
{{- $labels := dict "headrace.dev/model" .key -}}
{{- include "headrace.merge" (dict "to" $workload.spec.selector "from" (dict "matchLabels" $labels)) -}}
{{- include "headrace.merge" (dict "to" $workload.spec.template.metadata "from" (dict "labels" $labels)) -}}
{{- $_ := set $workload.metadata "name" (printf "headrace-worker-%s" .key) -}}
{{- range $container := concat (default list $workload.spec.template.spec.initContainers) $workload.spec.template.spec.containers -}}
  {{- range $container.env -}}
    {{- with .valueFrom -}}{{- with .configMapKeyRef -}}
      {{- if eq .name "headrace-model" -}}{{- $_ := set . "name" $config -}}{{- end -}}
    {{- end -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The image of the volume with the model, if there is such a volume. */ -}}
{{- define "headrace.modelImage" -}}
{{- $image := .image -}}
{{- range .workload.spec.template.spec.volumes -}}
  {{- if .image -}}{{- $_ := set .image "reference" $image -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* An autoscaler, of HPA or KEDA: its bounds, and the one model of several that it looks at. */ -}}
{{- define "headrace.scaler" -}}
{{- $scaler := .scaler -}}
{{- $model := .model -}}
{{- $suffix := ternary "Replicas" "ReplicaCount" (eq $scaler.kind "HorizontalPodAutoscaler") -}}
{{- range $field, $value := .bounds -}}
  {{- $_ := set $scaler.spec (printf "%s%s" (trimSuffix "Replicas" $field) $suffix) (int $value) -}}
{{- end -}}
{{- if $model -}}
  {{- range $scaler.spec.metrics -}}
    {{- with .external -}}{{- $_ := set .metric "selector" (dict "matchLabels" (dict "model" $model)) -}}{{- end -}}
  {{- end -}}
  {{- range $scaler.spec.triggers -}}
    {{- if eq .type "external-push" -}}
      {{- $_ := set .metadata "model" $model -}}
    {{- else if eq .type "prometheus" -}}
      {{- $_ := set .metadata "query" (replace "{namespace=" (printf "{model=%q,namespace=" $model) .metadata.query) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
