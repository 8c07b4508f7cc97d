package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/internal/plainyaml"
	"kubevirt.io/disk/volume/api"
)

const (
	typeYAML = "application/yaml"
	typeJSON = "application/json"

	// maxBody is the longest body of a request that is no upload, in bytes.
	maxBody = 64 << 10
	// maxValues is roughly how many values the YAML of a body may have. A request has some twenty.
	maxValues = 4 << 10
)

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if errors.As(err, new(*http.MaxBytesError)) {
		return nil, api.Errorf(api.CodeTooLarge, "a request has at most %d bytes: data goes to "+
			"/volume/NAME/data", maxBody)
	}
	if err != nil {
		return nil, api.Errorf(api.CodeInvalid, "the request did not come in whole: %v", err)
	}
	return text, nil
}

// parseSpec parses a request. It is YAML unless the client says that it is JSON.
func parseSpec(text []byte, contentType string) (spec api.Spec, err error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return api.Spec{}, nil
	}
	if kind, _, _ := mime.ParseMediaType(contentType); kind != typeJSON {
		if text, err = toJSON(text); err != nil {
			return api.Spec{}, err
		}
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&spec); err != nil {
		return api.Spec{}, explain(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return api.Spec{}, errors.New("something follows the first value")
	}
	return spec, nil
}

// explain says what a person can do about an error of the decoder.
func explain(err error) error {
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s: it is %s, and should be %s", kind.Field, kind.Value, kind.Type)
	}
	text := strings.TrimPrefix(err.Error(), "json: ")
	if strings.HasPrefix(text, "unknown field") {
		return fmt.Errorf("%s: the fields are %s", text, fieldsOf(reflect.TypeFor[api.Spec]()))
	}
	return errors.New(text)
}

// fieldsOf lists the fields of a request, each with its own fields.
func fieldsOf(t reflect.Type) string {
	var names []string
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Type.Kind() == reflect.Pointer {
			name += " (" + fieldsOf(f.Type.Elem()) + ")"
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}

// toJSON makes JSON of one YAML document.
func toJSON(text []byte) ([]byte, error) {
	var value any
	if err := plainyaml.Decode(text, maxValues, &value); err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if value == nil {
		return []byte("{}"), nil
	}
	out, err := json.Marshal(value)
	if err != nil {
		return nil, errors.New("a key in it is not a text")
	}
	return out, nil
}

// write answers with a value, in the format that the client prefers.
func write(w http.ResponseWriter, r *http.Request, status int, value any) {
	var text []byte
	var err error
	kind := typeYAML
	if wantsJSON(r.Header.Values("Accept")) {
		kind = typeJSON
		if text, err = json.MarshalIndent(value, "", "  "); err == nil {
			text = append(text, '\n')
		}
	} else {
		var out bytes.Buffer
		e := yaml.NewEncoder(&out)
		e.SetIndent(2)
		err = errors.Join(e.Encode(value), e.Close())
		text = out.Bytes()
	}
	if err != nil { // our types never fail
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.Header().Add("Vary", "Accept")
	w.WriteHeader(status)
	_, _ = w.Write(text) // if this fails, the client is gone
}

// wantsJSON reports whether a client prefers JSON to YAML (RFC 9110 12.5.1).
func wantsJSON(accept []string) bool {
	var json, other float64
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		kind, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		q := 1.0
		if text, ok := params["q"]; ok {
			if q, err = strconv.ParseFloat(text, 64); err != nil {
				continue
			}
		}
		if kind == typeJSON {
			json = max(json, q)
		} else {
			other = max(other, q)
		}
	}
	return json > 0 && json >= other
}
