// kube-scheduler's side of the wire, for extender.py: the client with which it asks an extender, and a clock.
//
// The same library with the same settings (makeTransport in pkg/scheduler/extender.go: net/http's transport,
// HTTP/1.1 without TLS and HTTP/2 with it), one question at a time. On standard input: "VERB LENGTH\n" and the
// body; on standard output: "NANOSECONDS LENGTH\n" and the answer, timed from the call to the answer's last byte.
//
//	scheduler_client URL [CA CERTIFICATE KEY]
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	transport := &http.Transport{ForceAttemptHTTP2: os.Getenv("DISABLE_HTTP2") == ""} // as Kubernetes spells it
	if len(os.Args) > 2 {
		transport.TLSClientConfig = secured(os.Args[2], os.Args[3], os.Args[4])
	}
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	in, out := bufio.NewReaderSize(os.Stdin, 1<<20), bufio.NewWriterSize(os.Stdout, 1<<20)
	var question, answer bytes.Buffer
	for {
		var verb string
		var length int64
		if _, err := fmt.Fscanf(in, "%s %d\n", &verb, &length); err == io.EOF {
			return
		} else {
			check(err)
		}
		question.Reset()
		_, err := io.CopyN(&question, in, length)
		check(err)
		took := ask(client, os.Args[1]+"/"+verb, question.Bytes(), &answer)
		fmt.Fprintf(out, "%d %d\n", took.Nanoseconds(), answer.Len())
		_, err = answer.WriteTo(out)
		check(err)
		check(out.Flush())
	}
}

func ask(client *http.Client, url string, question []byte, answer *bytes.Buffer) time.Duration {
	answer.Reset()
	began := time.Now()
	request, err := http.NewRequest("POST", url, bytes.NewReader(question))
	check(err)
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	check(err)
	defer response.Body.Close()
	_, err = answer.ReadFrom(response.Body)
	check(err)
	return time.Since(began)
}

func secured(authority, certificate, key string) *tls.Config {
	trusted, err := os.ReadFile(authority)
	check(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(trusted)
	pair, err := tls.LoadX509KeyPair(certificate, key)
	check(err)
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
