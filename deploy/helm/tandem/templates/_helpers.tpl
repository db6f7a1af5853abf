{{- define "tandem.labels" -}}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The Secret that holds Redis's password. */ -}}
{{- define "tandem.redisSecret" -}}
{{ .Values.redis.existingSecret | default "aibrix-redis" }}
{{- end }}

{{- define "tandem.redisHost" -}}
{{ .Values.redis.host | default "aibrix-redis-master" }}
{{- end }}
