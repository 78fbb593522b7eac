// What a server of Go's standard library pays for TLS and HTTP/2, for tls_cost.py: it reads a request, computes
// for so long, and answers.
//
//	tls_cost BUSY_US ANSWER_BYTES [CA CERTIFICATE KEY]
package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

func main() {
	busy, err := strconv.Atoi(os.Args[1])
	check(err)
	size, err := strconv.Atoi(os.Args[2])
	check(err)
	answer := bytes.Repeat([]byte("x"), size)
	server := &http.Server{Handler: http.HandlerFunc(func(to http.ResponseWriter, request *http.Request) {
		_, err := io.ReadAll(request.Body)
		check(err)
		for end := time.Now().Add(time.Duration(busy) * time.Microsecond); time.Now().Before(end); {
		}
		to.Header().Set("Content-Type", "application/json")
		to.Write(answer)
	})}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	if len(os.Args) == 3 {
		check(server.Serve(listener))
	}
	trusted, err := os.ReadFile(os.Args[3])
	check(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(trusted)
	server.TLSConfig = &tls.Config{ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
	check(server.ServeTLS(listener, os.Args[4], os.Args[5]))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
