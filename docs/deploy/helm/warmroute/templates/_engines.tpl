{{/* engineScaling with what its entries leave out, as JSON. */}}
{{- define "warmroute.scaledEngines" -}}
{{- $found := list -}}
{{- range .Values.engineScaling -}}
{{- $usual := dict "min" 0 "requestsPerReplica" 32 "idleSeconds" 900 "pollSeconds" 10 "prometheus" "" -}}
{{- $target := merge (deepCopy .target) (dict "apiVersion" "apps/v1" "kind" "Deployment") -}}
{{- $labels := ternary .labels (dict "namespace" $.Release.Namespace) (hasKey . "labels") -}}
{{- $found = append $found (merge (dict "target" $target "labels" $labels) . $usual) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The models that engineScaling names, as JSON. */}}
{{- define "warmroute.scaledModels" -}}
{{- $models := list -}}
{{- range .Values.engineScaling -}}{{- $models = concat $models .models -}}{{- end -}}
{{- toJson ($models | uniq) -}}
{{- end -}}

{{/* Of one model, the sum over all routers: {series, labels, model}. */}}
{{- define "warmroute.summed" -}}
{{- $matchers := list -}}
{{- range $label, $value := .labels -}}{{- $matchers = append $matchers (printf "%s=%q" $label $value) -}}{{- end -}}
{{- $matchers = append $matchers (printf "model=%q" .model) -}}
{{- printf .series (join "," $matchers) -}}
{{- end -}}

{{/* Requests of an entry's models, at routers and at engines. */}}
{{- define "warmroute.requestsOf" -}}
{{- $sums := list -}}
{{- range $model := .models -}}
{{- range $series := list "sum(warmroute_waiting_requests{%s})" "sum(warmroute_running_requests{%s})" -}}
{{- $sums = append $sums (include "warmroute.summed" (dict "series" $series "labels" $.labels "model" $model)) -}}
{{- end -}}
{{- end -}}
{{- join " + " $sums -}}
{{- end -}}

{{/* 1 if a request of an entry's models came in the last two minutes, else 0. */}}
{{- define "warmroute.incomingOf" -}}
{{- $sums := list -}}
{{- range $model := .models -}}
{{- $series := "sum(rate(warmroute_incoming_requests_total{%s}[2m]))" -}}
{{- $sums = append $sums (include "warmroute.summed" (dict "series" $series "labels" $.labels "model" $model)) -}}
{{- end -}}
{{- printf "(%s) > bool 0" (join " + " $sums) -}}
{{- end -}}

{{/* How engines leave. A pod that goes takes a warm cache with it: slowly. */}}
{{- define "warmroute.enginesLeave" -}}
stabilizationWindowSeconds: {{ min .idleSeconds 3600 }}
policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end -}}
