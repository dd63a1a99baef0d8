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
    {{- include "headrace.merge" (dict "to" (get $objects (printf "%s %s" .kind .metadata.name)) "from" .) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The values of a role, put into its workload. */ -}}
{{- define "headrace.role" -}}
{{- $root := .root -}}
{{- $workload := .workload -}}
{{- $values := .values -}}
{{- $pod := $workload.spec.template.spec -}}
{{- if hasKey $workload.spec "replicas" -}}{{- $_ := set $workload.spec "replicas" (int $values.replicas) -}}{{- end -}}
{{- if $root.Values.image.pullSecrets -}}
  {{- $secrets := list -}}
  {{- range $root.Values.image.pullSecrets -}}{{- $secrets = append $secrets (dict "name" .) -}}{{- end -}}
  {{- $_ := set $pod "imagePullSecrets" $secrets -}}
{{- end -}}
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
{{- $args := list -}}
{{- range $arg := $main.args -}}
  {{- $name := first (splitList "=" $arg) -}}
  {{- $kept := true -}}
  {{- range $values.args -}}{{- if eq $name (first (splitList "=" .)) -}}{{- $kept = false -}}{{- end -}}{{- end -}}
  {{- if $kept -}}{{- $args = append $args $arg -}}{{- end -}}
{{- end -}}
{{- $_ := set $main "args" (concat $args $values.args) -}}
{{- $env := list -}}
{{- range $name, $value := $values.env -}}{{- $env = append $env (dict "name" $name "value" (toString $value)) -}}{{- end -}}
{{- include "headrace.merge" (dict "to" $main "from" (dict "env" $env)) -}}
{{- include "headrace.merge" (dict "to" $workload "from" $values.patch) -}}
{{- end -}}
